"""NVFP4, bit for bit: values in E2M1, a scale in E4M3 for 16 of them, and one float32 scale for the matrix.

`encode` follows compressed-tensors, in float32. With top = max|w| over the matrix (and those that are loaded as one
matrix with it: they share the scale) and G a group of 16:

- global = 2688 / top (448 · 6: the largest scale times the largest value), 1 where top is below `SMALLEST`
- scale = E4M3(min(global · (max|G| / 6), 448)), 0.125 where that is zero
- code = E2M1(clip(w / (scale / global), -6, 6)); value = code · (scale / global)

E4M3 and E2M1 round half to even. In compressed-tensors' files the global scale divides, in modelopt's its reciprocal
multiplies; both are read, the first is written.

References: NVIDIA, Pretraining Large Language Models with NVFP4, arXiv 2509.25149.
"""

from typing import NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import Float, Shaped, UInt8

from convert.formats.mxfp4 import decode_pairs, encode_pairs
from convert.formats.scales import SMALLEST

BLOCK = 16
SCALE_DTYPE = np.dtype(ml_dtypes.float8_e4m3fn)
_LARGEST, _LARGEST_SCALE = np.float32(6), np.float32(448)
_LEAST_SCALE = np.float32(0.125)


class NVFP4Tensor(NamedTuple):
    """A quantised matrix.

    Attributes:
        codes: uint8 [out, in / 2], E2M1, the even element in the low four bits.
        scales: float8_e4m3fn [out, in / 16].
        global_scale: float32 [1], of the matrix.
        divides: Whether scales are divided by it (compressed-tensors), or multiplied (modelopt).
        dtype: Of the decoded weight, "bfloat16", "float16" or "float32".
    """

    codes: UInt8[np.ndarray, "out bytes"]
    scales: Shaped[np.ndarray, "out groups"]
    global_scale: Float[np.ndarray, " 1"]
    divides: bool
    dtype: str

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the decoded weight, [out, in]."""
        return self.codes.shape[0], 2 * self.codes.shape[1]


def global_scale_of(top: np.float32) -> Float[np.ndarray, " 1"]:
    """The scale of a matrix, float32 [1].

    Args:
        top: Its largest magnitude, float32.
    """
    scale = np.float32(1) if top < SMALLEST else _LARGEST_SCALE * _LARGEST / top
    return np.asarray([scale], np.float32)


def encode(values: Float[np.ndarray, "out in"], global_scale: Float[np.ndarray, " 1"], dtype: np.dtype) -> NVFP4Tensor:
    """Quantise rows.

    Args:
        values: Finite values, float32, the columns whole blocks of 16.
        global_scale: The whole matrix's, of `global_scale_of`.
        dtype: Of the decoded weight.
    """
    table = values.reshape(len(values), -1, BLOCK)
    largest = global_scale * (np.abs(table).max(axis=-1) / _LARGEST)
    scales = np.minimum(largest, _LARGEST_SCALE).astype(SCALE_DTYPE)
    wide = scales.astype(np.float32)
    wide = np.where(wide == 0, _LEAST_SCALE, wide)
    codes = encode_pairs((table / (wide / global_scale)[..., None]).reshape(values.shape))
    return NVFP4Tensor(codes, wide.astype(SCALE_DTYPE), global_scale, True, np.dtype(dtype).name)


def decode(tensor: NVFP4Tensor) -> Float[np.ndarray, "out in"]:
    """The values: float32 code times float32 scale, itself divided by (or times) the global one, cast."""
    scales = tensor.scales.astype(np.float32)
    scales = scales / tensor.global_scale if tensor.divides else scales * tensor.global_scale
    values = decode_pairs(tensor.codes).reshape(*scales.shape, BLOCK)
    values *= scales[..., None]
    return values.reshape(tensor.shape).astype(tensor.dtype)
