"""MXFP4 experts of gpt-oss, bit for bit: blocks of 32 values in E2M1 with one scale in E8M0.

``X_blocks`` uint8 [experts, out, in / 32, 16] has two values a byte, the even one in the low nibble; ``X_scales`` uint8
[experts, out, in / 32] are powers of two with a bias of 127. As X, in 16 bits, each expert is transposed.

References: Open Compute Project, Microscaling Formats (MX) Specification 1.0.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import Float, UInt8

from convert.blocks import Block
from convert.errors import ConvertError
from convert.formats.format import Format, Stored, configured_dtype
from convert.tensor_file import read_range

BLOCK = 32
CODES, SCALES = "_blocks", "_scales"
_NUMBERS = np.arange(256, dtype=np.uint8)
#: The two values of a byte.
_PAIRS = np.stack([_NUMBERS & 15, _NUMBERS >> 4], axis=1).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
_LARGEST, _EXPONENT = np.float32(6), 2  # of E2M1's values
ROUNDING = 2 / 8
"""A scale is a power of two, so that values up to 8 times it are clipped at 6 times it."""


class MXFP4Tensor(NamedTuple):
    """A matrix [out, in], or those of all experts.

    Attributes:
        codes: uint8 [X, out, in / 32, 16], without X for a matrix, the even element in the low nibble.
        scales: uint8 [X, out, in / 32], without X for a matrix, E8M0.
        dtype: Of the decoded weight, "bfloat16", "float16" or "float32".
    """

    codes: UInt8[np.ndarray, "*X out blocks bytes"]
    scales: UInt8[np.ndarray, "*X out blocks"]
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the decoded weight, [X, out, in] or [out, in]."""
        *rows, blocks = self.scales.shape
        return *rows, blocks * BLOCK

    @property
    def storage_dtype(self) -> str:
        """Dtype of the codes' bytes in files."""
        return "uint8"

    def turns(self, number: int, count: int) -> "MXFP4Tensor":
        """Each `count`-th row, from row `number` on."""
        return MXFP4Tensor(self.codes[:, number::count], self.scales[:, number::count], self.dtype)


def interleave(tensors: Sequence[MXFP4Tensor]) -> MXFP4Tensor:
    """The rows of several tensors by turns, the inverse of `MXFP4Tensor.turns`."""
    codes = np.stack([tensor.codes for tensor in tensors], axis=2)
    scales = np.stack([tensor.scales for tensor in tensors], axis=2)
    whole = codes.reshape(len(codes), -1, *codes.shape[3:])
    return MXFP4Tensor(whole, scales.reshape(len(scales), -1, scales.shape[3]), tensors[0].dtype)


def decode(codes: UInt8[np.ndarray, "*rows blocks bytes"], scales: UInt8[np.ndarray, "*rows blocks"]) -> np.ndarray:
    """The values, float32 [..., 32 · blocks].

    Args:
        codes: Two values a byte, the even one in the low nibble.
        scales: Of the blocks.
    """
    factors = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # non-finite values are found by their reader
        values = decode_pairs(codes).reshape(*scales.shape, BLOCK) * factors[..., None]
    return values.reshape(*scales.shape[:-1], -1)


def decode_pairs(codes: UInt8[np.ndarray, "*rows bytes"]) -> Float[np.ndarray, "*rows columns"]:
    """E2M1 as float32, two values a byte, the even one in the low four bits."""
    return _PAIRS[codes].reshape(*codes.shape[:-1], -1)


def encode_pairs(values: Float[np.ndarray, "*rows columns"]) -> UInt8[np.ndarray, "*rows bytes"]:
    """The inverse of `decode_pairs`: float32 clipped to ±6 and rounded, half to even."""
    nibbles = np.clip(values, -_LARGEST, _LARGEST).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return nibbles[..., ::2] | nibbles[..., 1::2] << 4


def encode(values: Float[np.ndarray, "*X out in"]) -> MXFP4Tensor:
    """Quantise by the specification: the largest magnitude gives the scale, values round to nearest even.

    Args:
        values: Finite values in float32, float16 or bfloat16, their rows whole blocks.

    Raises:
        ConvertError: Rows that are not whole blocks, or a value that is not finite.
    """
    if values.shape[-1] % BLOCK:
        raise ConvertError(f"MXFP4 encode: expected rows of whole blocks of {BLOCK}, got {values.shape[-1]} values")
    blocks = values.astype(np.float32).reshape(*values.shape[:-1], -1, BLOCK)
    largest = np.abs(blocks).max(axis=-1)
    if not np.isfinite(largest).all():
        raise ConvertError("MXFP4 encode: expected finite values, got infinity or NaN in the weight")
    exponents = np.clip(np.frexp(largest)[1] - 1 - _EXPONENT, -127, 127)
    codes = encode_pairs(np.ldexp(blocks, -exponents[..., None]))
    return MXFP4Tensor(codes, (exponents + 127).astype(np.uint8), values.dtype.name)


class _MXFP4(Format):
    name, label, target = "mxfp4", "MXFP4", "mxfp4"
    bits, packed, methods = 4, MXFP4Tensor, ("mxfp4",)
    rounding = ROUNDING
    writable = shared_experts = True

    def holds(self, stored: Stored) -> bool:
        return all(name in stored.checkpoint.tensors for name in self.claims(stored.name))

    def scheme(self, stored: Stored) -> str:
        return "mxfp4-experts"

    def made(self, tensor: Any) -> bool:
        return type(tensor) is MXFP4Tensor and tensor.codes.ndim == 4

    def misfit(self, stored: Stored) -> str | None:
        codes, scales = (stored.checkpoint.info(name) for name in self.claims(stored.name))
        experts, columns, rows = stored.shape
        wanted = (experts, rows, columns // BLOCK)
        if columns % BLOCK or codes.shape != (*wanted, BLOCK // 2) or scales.shape != wanted:
            shape = f"{[experts, rows, columns]} in blocks of {BLOCK}"
            return f"expected {shape}, got {list(codes.shape)} with scales {list(scales.shape)} in {codes.file.name}"
        if codes.dtype != "uint8" or scales.dtype != "uint8":
            return f"expected uint8, got {codes.dtype} with scales in {scales.dtype} in {codes.file.name}"
        return None

    def codes_name(self, name: str) -> str:
        return name + CODES

    def claims(self, name: str) -> tuple[str, ...]:
        return name + CODES, name + SCALES

    def decoded_dtype(self, stored: Stored) -> np.dtype:
        return configured_dtype(stored)

    def read(self, stored: Stored) -> MXFP4Tensor:
        codes, scales = (stored.checkpoint.read(name) for name in self.claims(stored.name))
        return MXFP4Tensor(codes, scales, self.decoded_dtype(stored).name)

    def decode(self, tensor: MXFP4Tensor) -> np.ndarray:
        result = np.empty(tensor.shape, tensor.dtype)
        for expert, (codes, scales) in enumerate(zip(tensor.codes, tensor.scales, strict=True)):
            result[expert] = decode(codes, scales)
        return result

    def expert(self, stored: Stored, number: int) -> np.ndarray:
        parts = []
        for name in self.claims(stored.name):
            info = stored.checkpoint.info(name)
            size = math.prod(info.shape[1:])
            parts.append(read_range(name, info, number * size, (number + 1) * size).reshape(info.shape[1:]))
        return decode(*parts).astype(self.decoded_dtype(stored)).T

    def blocks(self, stored: Stored) -> Iterator[Block]:
        for number in range(stored.shape[0]):
            yield self.expert(stored, number).astype(np.float32)

    def to_tensors(self, name: str, tensor: MXFP4Tensor) -> dict[str, np.ndarray]:
        parts = np.ascontiguousarray(tensor.codes), np.ascontiguousarray(tensor.scales)
        return dict(zip(self.claims(name), parts, strict=True))

    def quantization_config(self, dtype: str, skipped: list[str], storage_dtype: str = "uint8") -> dict[str, Any]:
        return {"quant_method": "mxfp4", "modules_to_not_convert": skipped}


MXFP4 = _MXFP4()
