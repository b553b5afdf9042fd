"""Matrices and settings of compressed-tensors' folders, written."""

import abc
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from convert.blocks import Block, whole_groups
from convert.errors import unexpected
from convert.finite import is_finite, nonfinite, not_in
from convert.formats.compressed import METHOD
from convert.formats.format import Values, Writer
from convert.shard import Chunk, Job

_TOKEN = {"symmetric": True, "dynamic": True, "strategy": "token"}
#: Format of inputs -> ``input_activations``; each token has scales of its own.
_INPUTS: Mapping[str | None, Mapping[str, Any] | None] = {
    None: None,
    "int8": {"num_bits": 8, "type": "int", **_TOKEN},
    "fp8": {"num_bits": 8, "type": "float", **_TOKEN},
    "fp8-128": {"num_bits": 8, "type": "float", **_TOKEN, "strategy": "group", "group_size": 128},
}
#: Suffix -> a tensor, or some rows of it.
Arrays = Mapping[str, np.ndarray]


class CompressedWriter(Writer, abc.ABC):
    """A format of compressed-tensors, written a few rows at a time.

    Values are rounded to the dtype that the matrix decodes to before they are quantised, so that it is one whether a
    model is written in 16 bits first.

    Attributes:
        rows_together: Rows that are encoded together.
        columns_together: Neighbours in a row that are; rows are whole groups of them.
    """

    rows_together: int = 1
    columns_together: int = 1

    def once(self, shape: tuple[int, ...], dtype: np.dtype, top: np.float32) -> Arrays:
        """The tensors that have no rows.

        Args:
            shape: Of the matrix.
            dtype: What it decodes to.
            top: With `whole`, the largest magnitude; else 0.
        """
        return {}

    @abc.abstractmethod
    def encoded(self, values: np.ndarray, dtype: np.dtype, top: np.float32) -> Arrays:
        """The other tensors' parts for some rows.

        Args:
            values: float32, finite values of `dtype`, the first row a multiple of `rows_together`.
            dtype: What the matrix decodes to.
            top: As for `once`.
        """

    def described(self, shape: tuple[int, ...], dtype: np.dtype) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        """Suffix -> dtype and shape of each tensor of a matrix: those of a few rows of zeros, for all rows.

        Args:
            shape: Of the matrix.
            dtype: What it decodes to.
        """
        once, zero = self.once(shape, dtype, np.float32(0)), (self, self.rows_together, shape[1], dtype)
        rows = {
            suffix: (kind, (-(-shape[0] * count // self.rows_together), *width))
            for suffix, (kind, (count, *width)) in _encoded_zeros(*zero).items()
        }
        return rows | {suffix: (array.dtype, array.shape) for suffix, array in once.items()}

    @abc.abstractmethod
    def settings(self) -> tuple[str, dict[str, Any]]:
        """``format`` of the folder and ``weights`` of its group."""

    def job(self, values: Values) -> Job:
        """A matrix from its values; as `Writer.job`."""
        source, name, blocks, shape, dtype, peers = values
        if shape[1] % self.columns_together:
            expected = f"rows of whole groups of {self.columns_together} for {self.name} (or 16 bits: skip the module)"
            raise unexpected(source, name, expected, shape[1])
        outputs = {name + suffix: described for suffix, described in self.described(shape, dtype).items()}
        refused = nonfinite(source, name, where=f"where {dtype} cannot hold them", way_out=not_in(self.label))

        def wide(block: Block) -> np.ndarray:
            return values.rounded(block).astype(np.float32, copy=False)

        def run() -> Iterator[Chunk]:
            top = np.float32(0)
            for every in (blocks, *peers) if self.whole else ():
                for block in every():
                    top = np.maximum(top, np.abs(wide(block)).max(initial=np.float32(0)))
            if not np.isfinite(top):
                raise refused
            for suffix, array in self.once(shape, dtype, top).items():
                yield Chunk(name + suffix, 0, array.reshape(-1))
            done = dict.fromkeys(outputs, 0)
            for _, flat in whole_groups(blocks(), self.rows_together * shape[1]):
                rows = wide(flat).reshape(-1, shape[1])
                if not is_finite(rows):
                    raise refused
                for suffix, array in self.encoded(rows, dtype, top).items():
                    yield Chunk(name + suffix, done[name + suffix], array.reshape(-1))
                    done[name + suffix] += array.size

        return Job(outputs, run, source)

    def quantization_config(self, dtype: str, skipped: list[str], storage_dtype: str = "uint8") -> dict[str, Any]:
        """The settings of a folder; as `Writer.quantization_config`."""
        form, weights = self.settings()
        group = {
            "targets": ["Linear"],
            "weights": {"symmetric": True, "dynamic": False, **weights},
            "input_activations": _INPUTS[self.activations],
            "output_activations": None,
        }
        return {
            "quant_method": METHOD,
            "format": form,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": skipped,
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }


@functools.lru_cache(256)
def _encoded_zeros(
    writer: CompressedWriter, rows: int, columns: int, dtype: np.dtype
) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """Suffix -> dtype and shape of encoded rows."""
    arrays = writer.encoded(np.zeros((rows, columns), np.float32), dtype, np.float32(0))
    return {suffix: (array.dtype, array.shape) for suffix, array in arrays.items()}
