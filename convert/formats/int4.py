"""Integers of four bits in groups of a row, with a scale a group: compressed-tensors' ``pack-quantized``, bit for bit.

`encode` divides as compressed-tensors does, but in float32 whatever the weight has, with a scale that is rounded to
the stored dtype first. With G the group, all in float32:

- symmetric: scale = round(max|G| / 7.5); code = rint(clip(w / scale, -8, 7)); value = code · scale
- with zero points: low = min(G, 0), high = max(G, 0); scale = round((high - low) / 15);
  zero = rint(clip(-8 - low / scale, -8, 7)); code = rint(clip(w / scale + zero, -8, 7)); value = (code - zero) · scale

rint rounds half to even, round is to the dtype of the scales (`convert.formats.scales.divided`). torchao has the same
scale, but multiplies by its reciprocal.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, Shaped, UInt8

from convert.formats.scales import divided

LOWEST, HIGHEST = np.float32(-8), np.float32(7)
OFFSET = 8  # of a code in its four bits
_NUMBERS = np.arange(256, dtype=np.uint8)
#: The two codes of a byte, the even element in the low bits.
_PAIRS = np.stack([_NUMBERS & 15, _NUMBERS >> 4], axis=1).astype(np.float32) - np.float32(OFFSET)


class Int4Tensor(NamedTuple):
    """A quantised matrix.

    Attributes:
        codes: uint8 [out, in / 2]: the code plus 8, the even element in the low four bits.
        scales: [out, groups] in the dtype of the file.
        zeros: int8 [out, groups], or None for a symmetric one.
        dtype: Of the decoded weight, "bfloat16", "float16" or "float32".
    """

    codes: UInt8[np.ndarray, "out bytes"]
    scales: Shaped[np.ndarray, "out groups"]
    zeros: Int[np.ndarray, "out groups"] | None
    dtype: str

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the decoded weight, [out, in]."""
        return self.codes.shape[0], 2 * self.codes.shape[1]


def encode(values: Float[np.ndarray, "out in"], group: int, symmetric: bool, dtype: np.dtype) -> Int4Tensor:
    """Quantise rows.

    Args:
        values: Finite values, float32, the columns whole groups.
        group: Neighbours in a row that share a scale, an even number.
        symmetric: Whether zero is code 0, or has a code of its own in each group.
        dtype: Of the scales, and of the decoded weight.

    Returns:
        The quantised rows; a scale is infinite where `dtype` cannot hold it.
    """
    table = values.reshape(len(values), -1, group)
    if symmetric:
        scales, zeros = divided(np.abs(table).max(axis=-1), 7.5, dtype), None
        scaled = table / scales[..., None]
    else:
        low = np.minimum(table.min(axis=-1), np.float32(0))
        high = np.maximum(table.max(axis=-1), np.float32(0))
        scales = divided(high - low, 15, dtype)
        zeros = np.rint(np.clip(LOWEST - low / scales, LOWEST, HIGHEST))
        scaled = table / scales[..., None] + zeros[..., None]
    codes = in_pairs(np.rint(np.clip(scaled, LOWEST, HIGHEST)).astype(np.int8).reshape(values.shape))
    return Int4Tensor(
        codes, scales.astype(dtype), None if zeros is None else zeros.astype(np.int8), np.dtype(dtype).name
    )


def in_pairs(codes: Int[np.ndarray, "out in"]) -> UInt8[np.ndarray, "out bytes"]:
    """Codes as `Int4Tensor` has them: of int8, from -8 to 7."""
    shifted = (codes + np.int8(OFFSET)).view(np.uint8)
    return shifted[:, ::2] | shifted[:, 1::2] << 4


def in_bytes(pairs: UInt8[np.ndarray, "out bytes"]) -> Int[np.ndarray, "out in"]:
    """The inverse of `in_pairs`."""
    codes = np.stack([pairs & 15, pairs >> 4], axis=-1).view(np.int8) - np.int8(OFFSET)
    return codes.reshape(len(pairs), -1)


def decode(tensor: Int4Tensor) -> Float[np.ndarray, "out in"]:
    """The values: float32 codes less zero times float32 scale, cast to the tensor's dtype."""
    rows, groups = tensor.scales.shape
    codes = _PAIRS[tensor.codes].reshape(rows, groups, -1)
    if tensor.zeros is not None:
        codes -= tensor.zeros[..., None].astype(np.float32)
    codes *= tensor.scales[..., None].astype(np.float32)
    return codes.reshape(tensor.shape).astype(tensor.dtype)


def pack_zeros(zeros: Int[np.ndarray, "out groups"]) -> Int[np.ndarray, "words groups"]:
    """Zero points as a file has them: those of eight rows in an int32 [ceil(out / 8), groups], the first row lowest."""
    rows, groups = zeros.shape
    padded = np.zeros((-(-rows // 8) * 8, groups), np.uint8)
    padded[:rows] = (zeros + np.int8(OFFSET)).view(np.uint8)
    pairs = padded[::2] | padded[1::2] << 4
    return np.ascontiguousarray(pairs.reshape(-1, 4, groups).swapaxes(1, 2)).view("<i4")[..., 0]


def unpack_zeros(words: Int[np.ndarray, "words groups"], rows: int) -> Int[np.ndarray, "rows groups"]:
    """The inverse of `pack_zeros`: int8, of the first `rows` rows."""
    count, groups = words.shape
    pairs = np.ascontiguousarray(words, "<i4").view(np.uint8).reshape(count, groups, 4).swapaxes(1, 2)
    nibbles = np.stack([pairs & 15, pairs >> 4], axis=2).reshape(8 * count, groups)
    return nibbles[:rows].view(np.int8) - np.int8(OFFSET)
