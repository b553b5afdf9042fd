"""compressed-tensors, the format of llm-compressor and vLLM: its settings in config.json, and its files.

A folder's matrices are rows of codes with scales beside them, under names that begin with the weight's own:
``X.weight_packed`` (or ``X.weight``), ``X.weight_scale``, ``X.weight_zero_point``, ``X.weight_shape``,
``X.weight_global_scale``. Which format a matrix is in follows from these names, their dtypes and shapes, so folders
that leave some modules in 16 bits or mix formats just work. Activations are not quantised here: settings and scales
that are about them are for servers, and are read past.
"""

import abc
import functools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from convert.blocks import Block, row_ranges, whole_groups
from convert.errors import unexpected
from convert.finite import is_finite, nonfinite, not_in
from convert.formats.format import Format, Stored, Values, Writer, configured_dtype
from convert.shard import Chunk, Job
from convert.tensor_file import read_range

METHOD = "compressed-tensors"
#: Scales of activations, after the module's name.
UNUSED = (
    *(".input_scale", ".activation_scale", ".input_scale_ub", ".output_scale"),
    *(".input_global_scale", ".input_zero_point", ".output_zero_point"),
)
#: Kinds of weights that are read: (type, bits).
_KINDS = (("float", 4), ("float", 8), ("int", 4), ("int", 8))
_FIELD = "quantization_config"
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


class Compressed(Format):
    """A format of compressed-tensors, read a few rows at a time.

    Attributes:
        kind: ``type``, ``num_bits`` and ``strategy`` of its weights in config.json; None: any strategy.
        suffixes: What follows a weight's name in those of its tensors, the codes' first.
        rows_together: Rows that share a part of the file.
    """

    methods = (METHOD,)
    kind: tuple[str, int, str | None]
    suffixes: tuple[str, ...]
    rows_together: int = 1

    @abc.abstractmethod
    def rows(self, stored: Stored, first: int, last: int) -> Any:
        """Some rows as they are stored, of class `packed`; `first` is a multiple of `rows_together`."""

    def claims(self, name: str) -> tuple[str, ...]:
        """The weight's tensors, and the module's scales of activations."""
        module = name.removesuffix(".weight")
        return (*(name + suffix for suffix in self.suffixes), *(module + suffix for suffix in UNUSED))

    def codes_name(self, name: str) -> str:
        """With the first suffix."""
        return name + self.suffixes[0]

    def decoded_dtype(self, stored: Stored) -> np.dtype:
        """That of config.json."""
        return configured_dtype(stored)

    def read(self, stored: Stored) -> Any:
        """All rows; as `Format.read`."""
        return self.rows(stored, 0, stored.shape[0])

    def blocks(self, stored: Stored) -> Iterator[Block]:
        """Decoded rows; as `Format.blocks`."""
        for first, last in row_ranges(stored.shape, self.rows_together * stored.shape[1]):
            yield self.decode(self.rows(stored, first, last)).astype(np.float32, copy=False)

    def declares(self, quantization: Mapping[str, Any]) -> bool:
        """Whether its first group has weights of this kind."""
        *kind, strategy = kind_of(quantization)
        return super().declares(quantization) and (*kind, self.kind[2] and strategy) == self.kind

    def check_config(self, quantization: Mapping[str, Any], file: str | os.PathLike[str]) -> None:
        """Refuse settings with `check_settings`."""
        check_settings(quantization, file)


def part(stored: Stored, suffix: str, first: int, last: int) -> np.ndarray:
    """Rows of a tensor beside a weight, in its dtype.

    Args:
        stored: The weight.
        suffix: What follows its name.
        first: The first row.
        last: One past the last.
    """
    name = stored.name + suffix
    info = stored.checkpoint.info(name)
    width = math.prod(info.shape[1:])
    return read_range(name, info, first * width, last * width).reshape(last - first, width)


def misfits(stored: Stored, expected: Mapping[str, tuple[Sequence[str], Sequence[tuple[int, ...]]]]) -> str | None:
    """The fault of a weight's tensors, in words; None without one.

    Args:
        stored: The weight.
        expected: Suffix -> dtypes and shapes that the tensor may have.
    """
    for suffix, (dtypes, shapes) in expected.items():
        name = stored.name + suffix
        if name not in stored.checkpoint.tensors:
            return f"{name} is missing"
        info = stored.checkpoint.info(name)
        if info.dtype not in dtypes or info.shape not in shapes:
            few = " or ".join(str(list(shape)) for shape in shapes[:4])
            return f"{name}: expected {' or '.join(dtypes)} {few}, got {info.dtype} {list(info.shape)}"
    return None


def group_weights(quantization: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Names of the groups of a ``quantization_config``, each with what it says of weights; none elsewhere."""
    groups = quantization.get("config_groups")
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            yield name, weights


def kind_of(quantization: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """``type``, ``num_bits`` and ``strategy`` of the first group's weights; without groups those of FP8."""
    weights = next((weights for _, weights in group_weights(quantization)), {"type": "float", "num_bits": 8})
    return weights.get("type"), weights.get("num_bits"), weights.get("strategy")


def check_settings(quantization: Mapping[str, Any], file: str | os.PathLike[str]) -> None:
    """Refuse settings of compressed-tensors under which weights are not what their codes and scales say.

    Args:
        quantization: ``quantization_config`` of config.json.
        file: The file, for messages.

    Raises:
        ConvertError: Weights are rotated, sparse, reordered or of a type that is not read; the message names the field.
    """
    for field in ("transform_config", "sparsity_config"):
        if quantization.get(field):
            raise unexpected(file, f"{_FIELD}.{field}", "nothing (it changes the weights)", quantization[field])
    for name, weights in group_weights(quantization):
        where = f"{_FIELD}.config_groups.{name}.weights"
        kind = weights.get("type"), weights.get("num_bits")
        if kind not in _KINDS:
            known = ", ".join(f"{bits} bits of type {type_}" for type_, bits in _KINDS)
            raise unexpected(file, where, known, f"{kind[1]} bits of type {kind[0]}")
        size = weights.get("group_size")
        if size is not None and (type(size) is not int or size == 0):
            raise unexpected(file, f"{where}.group_size", "a positive integer, -1 or null", size)
        if weights.get("actorder") in ("group", "dynamic", True):
            raise unexpected(file, f"{where}.actorder", "none (columns are reordered)", weights["actorder"])


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
