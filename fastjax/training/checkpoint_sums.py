"""Checksums of a checkpoint's arrays: a CRC of the bytes in their order, or a sum over the elements in any order.

Of several processes each has parts of an array. So each element is mixed with its place, and the devices add these up
where the parts are. A change to one element is always found, any other with a chance of 1 - 2⁻³².

Nothing here imports JAX.
"""

import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

#: Beginning of a checksum that is a sum.
SUM = "sum-"

#: A part of an array: along each axis its first index, and the one behind the last.
Region = tuple[tuple[int, int], ...]


def array_bytes(array: np.ndarray) -> Any:
    """An array's bytes in their order, as NumPy's: dtypes of ml_dtypes are no buffers.

    Args:
        array: of any shape and dtype.
    """
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def checksum(array: np.ndarray) -> str:
    """The CRC-32 of an array's bytes, as eight hexadecimal digits.

    Args:
        array: of any shape and dtype.
    """
    return f"{zlib.crc32(array_bytes(array)):08x}"


def element_sum(bits: Any, xp: Any, places: Any = None) -> Any:
    """The sum, modulo 2³², of an array's elements, each mixed with its place by a bijection (MurmurHash3's finaliser).

    Args:
        bits: the elements as unsigned integers of up to 32 bits.
        xp: numpy, or jax.numpy.
        places: of the elements, uint32 of their shape; None: these are all, and follow each other.

    Returns:
        uint32 [].
    """
    place = xp.arange(bits.size, dtype=xp.uint32).reshape(bits.shape) if places is None else places
    mixed = bits.astype(xp.uint32) ^ (place * xp.uint32(0x9E3779B1))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        mixed = (mixed ^ (mixed >> xp.uint32(shift))) * xp.uint32(factor)
    return xp.sum(mixed, dtype=xp.uint32)


def region_sum(values: np.ndarray, region: Region, shape: Sequence[int]) -> int:
    """The `element_sum` of a part of an array; those of all parts add up to the array's, modulo 2³².

    Args:
        values: the part.
        region: its place.
        shape: of the array.
    """
    values = np.atleast_1d(np.ascontiguousarray(values))
    bits = values.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[values.dtype.itemsize])
    places = np.zeros((1,) * bits.ndim, np.uint32)
    for axis, (first, last) in enumerate(region):
        stride = np.uint32(math.prod(shape[axis + 1 :]) % 2**32)
        indices = np.arange(first, last).astype(np.uint32) * stride
        places = places + indices.reshape(-1, *(1,) * (bits.ndim - axis - 1))
    return int(element_sum(bits, np, places))


def sum_checksum(value: Any) -> str:
    """The checksum of an array that was written in parts.

    Args:
        value: its `element_sum`, or the sum of those of its parts.
    """
    return f"{SUM}{int(value) % 2**32:08x}"


def whole_region(shape: Sequence[int]) -> Region:
    """The region of all of an array.

    Args:
        shape: of the array.
    """
    return tuple((0, size) for size in shape)
