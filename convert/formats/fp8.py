"""FP8 weights (E4M3) with their scales, bit for bit: blocks of 128 × 128, one scale a row, or one in all.

- Fine-grained (``quant_method: fp8``): ``X.weight`` and ``X.weight_scale_inv``, float32 or E8M0
  [ceil(out / 128), ceil(in / 128)], a factor in spite of its name; or a single one.
- By row (``fbgemm_fp8``, ``compressed-tensors``): ``X.weight_scale`` [out, 1], or a single one.

A value is the code in float32 times its scale in float32, cast last. Scales of activations in these folders are
ignored.
"""

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Shaped

from convert.blocks import Block, row_ranges
from convert.checkpoint import CONFIG
from convert.errors import ConvertError, unexpected
from convert.formats import compressed
from convert.formats.format import Format, Stored, configured_dtype
from convert.tensor_file import read_range

DTYPES = ("float8_e4m3fn", "float8_e5m2")
SCALES = ("_scale_inv", "_scale")  # after the weight's name
SCALE_DTYPES = ("float32", "bfloat16", "float16", "float8_e8m0fnu")
METHODS = ("fp8", "fbgemm_fp8", compressed.METHOD)
_CODES = np.arange(256, dtype=np.uint8)
_VALUES = {name: _CODES.view(name).astype(np.float32) for name in (*DTYPES, "int8")}


class Scale(NamedTuple):
    """The scales of a weight.

    Attributes:
        values: float32 [rows of blocks, columns of blocks].
        block: Rows and columns of a block.
    """

    values: Float[np.ndarray, "rows columns"]
    block: tuple[int, int]


class FP8Tensor(NamedTuple):
    """A weight as it is stored.

    Attributes:
        codes: float8_e4m3fn or float8_e5m2 [out, in].
        scale: Its scales.
        dtype: Of the decoded weight, "bfloat16", "float16" or "float32".
    """

    codes: Shaped[np.ndarray, "out in"]
    scale: Scale
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return self.codes.shape


def block_shape(config: Mapping[str, Any], file: str | os.PathLike[str]) -> tuple[int, int]:
    """Rows and columns of a block by config.json, ``weight_block_size`` or a group's; 128 × 128 without an entry.

    Args:
        config: Contents of config.json.
        file: Its path, for the message.

    Raises:
        ConvertError: The entry is no pair of positive integers.
    """
    quantization = config.get("quantization_config")
    field, size = "weight_block_size", None
    if isinstance(quantization, Mapping):
        size = quantization.get(field)
        for name, weights in compressed.group_weights(quantization) if size is None else ():
            field, size = f"config_groups.{name}.weights.block_structure", weights.get("block_structure", size)
    if size is None:
        return 128, 128
    if not (isinstance(size, list) and len(size) == 2 and all(type(n) is int and 0 < n < 2**31 for n in size)):
        raise unexpected(file, f"quantization_config.{field}", "two positive integers", size)
    return size[0], size[1]


def make_scale(
    name: str,
    scales: Shaped[np.ndarray, "..."],
    shape: tuple[int, ...],
    block: tuple[int, int],
    file: str | os.PathLike[str],
) -> Scale:
    """A weight's scales, recognised by their shape.

    Args:
        name: Of the scales, for the message.
        scales: float32, bfloat16, float16 or E8M0: one for each block, one a row, or a single one.
        shape: Of the weight.
        block: Rows and columns of a block.
        file: Theirs, for the message.

    Raises:
        ConvertError: Another shape or dtype, or scales that are not finite.
    """
    if scales.dtype.name not in SCALE_DTYPES:
        raise unexpected(file, name, "scales in float32, bfloat16, float16 or E8M0", scales.dtype.name)
    values = scales.astype(np.float32)
    if not np.isfinite(values).all():
        raise unexpected(file, name, "finite scales", "NaN or infinity")
    rows, columns = shape
    if scales.size == 1:
        return Scale(values.reshape(1, 1), (max(rows, 1), max(columns, 1)))
    if scales.shape in ((rows, 1), (rows,)):
        return Scale(values.reshape(-1, 1), (1, max(columns, 1)))
    blocks = (math.ceil(rows / block[0]), math.ceil(columns / block[1]))
    if scales.shape != blocks:
        raise unexpected(file, name, f"shape {list(blocks)} (blocks), [{rows}, 1] or [1]", list(scales.shape))
    return Scale(values, block)


def decode(
    codes: Shaped[np.ndarray, "rows columns"], scale: Scale, first: int = 0
) -> Float[np.ndarray, "rows columns"]:
    """The values of some rows.

    Args:
        codes: float8_e4m3fn, float8_e5m2 or int8.
        scale: Of the whole weight.
        first: Number of the first row in the weight.

    Returns:
        float32, each code times its block's scale.
    """
    values = _VALUES[codes.dtype.name][codes.view(np.uint8)]
    rows = (first + np.arange(len(codes))) // scale.block[0]
    by_row = scale.values[rows]
    width = scale.block[1]
    whole = codes.shape[1] // width
    table = values[:, : whole * width].reshape(len(codes), whole, width)
    table *= by_row[:, :whole, None]
    values[:, whole * width :] *= by_row[:, whole:]
    return values


class _FP8(Format):
    name, label, target = "fp8", "FP8", "fp8"
    bits, packed, methods = 8, FP8Tensor, METHODS
    rounding = 1 / 16  # half of a step over the least value that has it

    def holds(self, stored: Stored) -> bool:
        info = stored.info
        return info.dtype in DTYPES and info.shape == stored.shape and len(info.shape) == 2

    def scheme(self, stored: Stored) -> str:
        quantization = stored.checkpoint.config.get("quantization_config") or {}
        if quantization.get("quant_method") != compressed.METHOD or stored.info.dtype != DTYPES[0]:
            return self.name
        kinds = [weights for _, weights in compressed.group_weights(quantization) if weights.get("type") == "float"]
        strategy = compressed.kind_of(quantization)[2]
        same = all(weights.get("strategy") == strategy for weights in kinds)
        if not same or any(weights.get("block_structure") not in (None, [128, 128]) for weights in kinds):
            return self.name
        schemes = (("channel", "fp8-row"), ("tensor", "fp8-tensor"), ("block", "fp8-block"))
        return next((name for known, name in schemes if known == strategy), self.name)

    def declares(self, quantization: Mapping[str, Any]) -> bool:
        other = quantization.get("quant_method") != compressed.METHOD
        return super().declares(quantization) and (other or compressed.kind_of(quantization)[:2] == ("float", 8))

    def claims(self, name: str) -> tuple[str, ...]:
        module = name.removesuffix(".weight")
        return (name, *(name + suffix for suffix in SCALES), *(module + suffix for suffix in compressed.UNUSED))

    def decoded_dtype(self, stored: Stored) -> np.dtype:
        return configured_dtype(stored)

    def read(self, stored: Stored) -> FP8Tensor:
        return FP8Tensor(stored.checkpoint.read(stored.name), _scale(stored), self.decoded_dtype(stored).name)

    def decode(self, tensor: FP8Tensor) -> np.ndarray:
        return decode(tensor.codes, tensor.scale).astype(tensor.dtype)

    def blocks(self, stored: Stored) -> Iterator[Block]:
        scale, dtype, columns = _scale(stored), self.decoded_dtype(stored), stored.shape[1]
        for begin, end in row_ranges(stored.shape):
            codes = read_range(stored.name, stored.info, begin * columns, end * columns).reshape(-1, columns)
            yield decode(codes, scale, begin).astype(dtype).astype(np.float32)


def _scale(stored: Stored) -> Scale:
    checkpoint, name = stored.checkpoint, stored.name
    names = [name + suffix for suffix in SCALES if name + suffix in checkpoint.tensors]
    if not names:
        raise ConvertError(f"{stored.info.file}: {name} is FP8 and needs {name}{SCALES[0]}, which is missing")
    block = block_shape(checkpoint.config, checkpoint.folder / CONFIG)
    return make_scale(names[0], checkpoint.read(names[0]), stored.shape, block, checkpoint.info(names[0]).file)


FP8 = _FP8()
