"""int4 in checkpoints: compressed-tensors' ``pack-quantized``, with or without zero points, and ``int-quantized``.

The second has a byte a code. It is what llm-compressor writes, and servers read, where inputs are in int8 too.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from convert.errors import unexpected
from convert.formats import int4
from convert.formats.compressed import Arrays, Compressed, CompressedWriter, kind_of, misfits, part
from convert.formats.format import Stored
from convert.formats.int4 import Int4Tensor

PACKED, SCALE, ZEROS, SHAPE = "_packed", "_scale", "_zero_point", "_shape"
_SCALES = ("float32", "bfloat16", "float16")
_IN_A_WORD = 8  # codes, or zero points of rows


class _Int4(Compressed):
    name, label, target = "int4", "INT4", "int4"
    bits, packed, kind = 4, Int4Tensor, ("int", 4, None)
    rounding = 1 / 7.5  # a step: half of one, and with zero points half of theirs
    suffixes, rows_together = (PACKED, SCALE, ZEROS, SHAPE), _IN_A_WORD

    def holds(self, stored: Stored) -> bool:
        return stored.checkpoint.info(stored.name + PACKED).dtype == "int32"

    def scheme(self, stored: Stored) -> str:
        groups = stored.checkpoint.info(stored.name + SCALE).shape[1]
        return _scheme(stored.shape[1] // groups, stored.name + ZEROS not in stored.checkpoint.tensors)

    def misfit(self, stored: Stored) -> str | None:
        if len(stored.shape) != 2 or stored.shape[1] % _IN_A_WORD:
            return f"INT4: expected a matrix with rows of whole words of {_IN_A_WORD}, got {list(stored.shape)}"
        rows, columns = stored.shape
        expected = {
            PACKED: (("int32",), [(rows, columns // _IN_A_WORD)]),
            SCALE: (_SCALES, [(rows, n) for n in _divisors(columns)]),
            SHAPE: (("int64", "int32"), [(2,)]),
        }
        problem = misfits(stored, expected)
        if problem is None and stored.name + ZEROS in stored.checkpoint.tensors:
            groups = stored.checkpoint.info(stored.name + SCALE).shape[1]
            problem = misfits(stored, {ZEROS: (("int32",), [(-(-rows // _IN_A_WORD), groups)])})
        return problem

    def rows(self, stored: Stored, first: int, last: int) -> Int4Tensor:
        codes = part(stored, PACKED, first, last).view(np.uint8)
        scales = part(stored, SCALE, first, last)
        zeros = None
        if stored.name + ZEROS in stored.checkpoint.tensors:
            words = part(stored, ZEROS, first // _IN_A_WORD, -(-last // _IN_A_WORD))
            zeros = int4.unpack_zeros(words, last - first)
        return Int4Tensor(codes, scales, zeros, self.decoded_dtype(stored).name)

    def decode(self, tensor: Int4Tensor) -> np.ndarray:
        return int4.decode(tensor)


class _Int4Bytes(_Int4):
    """Without zero points, a byte a code; in memory as the other."""

    name = "int4-bytes"
    suffixes, rows_together = ("", SCALE), 1

    def holds(self, stored: Stored) -> bool:
        quantization = stored.checkpoint.config.get("quantization_config")
        bits = kind_of(quantization)[1] if isinstance(quantization, Mapping) else None
        return stored.info.dtype == "int8" and bits == 4 and stored.name + SCALE in stored.checkpoint.tensors

    def scheme(self, stored: Stored) -> str:
        return self.name

    def declares(self, quantization: Mapping[str, Any]) -> bool:
        return super().declares(quantization) and quantization.get("format") == "int-quantized"

    def made(self, tensor: Any) -> bool:
        return False  # the other's

    def misfit(self, stored: Stored) -> str | None:
        if len(stored.shape) != 2 or stored.shape[1] % 2:
            return f"INT4: expected a matrix with rows of pairs, got {list(stored.shape)}"
        scales = [(stored.shape[0], n) for n in _divisors(stored.shape[1])]
        return misfits(stored, {"": (("int8",), [stored.shape]), SCALE: (_SCALES, scales)})

    def rows(self, stored: Stored, first: int, last: int) -> Int4Tensor:
        codes = part(stored, "", first, last)
        if codes.min(initial=0) < int4.LOWEST or codes.max(initial=0) > int4.HIGHEST:
            raise unexpected(stored.info.file, stored.name, "codes from -8 to 7", f"{codes.min()} to {codes.max()}")
        scales = part(stored, SCALE, first, last)
        return Int4Tensor(int4.in_pairs(codes), scales, None, self.decoded_dtype(stored).name)


class _Int4Writer(CompressedWriter):
    label, bits = "INT4", 4

    def __init__(self, group: int, symmetric: bool):
        self.name, self.group, self.symmetric = _scheme(group, symmetric), group, symmetric
        self.columns_together, self.rows_together = group, 1 if symmetric else _IN_A_WORD
        self.inputs = (None, "int8", "fp8") if symmetric else (None,)

    def once(self, shape: tuple[int, ...], dtype: np.dtype, top: np.float32) -> Arrays:
        return {} if self.activations == "int8" else {SHAPE: np.asarray(shape, np.int64)}

    def encoded(self, values: np.ndarray, dtype: np.dtype, top: np.float32) -> Arrays:
        tensor = int4.encode(values, self.group, self.symmetric, dtype)
        if self.activations == "int8":
            return {"": int4.in_bytes(tensor.codes), SCALE: tensor.scales}
        parts = {PACKED: tensor.codes.view("<i4"), SCALE: tensor.scales}
        return parts if tensor.zeros is None else parts | {ZEROS: int4.pack_zeros(tensor.zeros)}

    def settings(self) -> tuple[str, dict[str, Any]]:
        weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": self.group}
        form = "int-quantized" if self.activations == "int8" else "pack-quantized"
        return form, weights | {"symmetric": self.symmetric}


def _scheme(group: int, symmetric: bool) -> str:
    return f"int4-{group}" if symmetric else f"int4-{group}-zeros"


def _divisors(columns: int) -> list[int]:
    """Numbers of groups: whole ones, of an even number of columns."""
    return [groups for groups in range(1, columns // 2 + 1) if columns % (2 * groups) == 0]


INT4, INT4_BYTES = _Int4(), _Int4Bytes()
INT4_WRITERS = tuple(_Int4Writer(group, symmetric) for symmetric in (True, False) for group in (32, 128))
