"""Arrays in eight bits, block by block, with bitsandbytes' dynamic maps (Dettmers et al., arXiv 2110.02861).

The elements of a tensor, row by row, are cut into blocks of 256. A block stores its largest magnitude in float32, and
an element the code of the map's value nearest to element / magnitude, the lower one at a tie. (So do bitsandbytes'
Triton and PyTorch code; its CUDA code gives a negative number nearest to zero the lowest negative value instead.)
Blocks do not cross from one stacked layer into the next: a layer whose size is no multiple of 256 ends with a short
block, as it does where the layers are separate tensors.

Codes keep the array's shape, so its sharding applies. Encoding is arithmetic, because a search in the map would cost
more than the update. Its rounding moves a border by less than 1e-5 of the distance of two values, so a number midway
between two values, to five digits, may get the code of either.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, UInt8

from convert.formats.dynamic import dynamic_map

BLOCK = 256


class Blockwise(NamedTuple):
    """A quantised array.

    Attributes:
        codes: indices into the map, in the array's shape [*stack, *shape].
        absmax: largest magnitude of each block, [*stack, ceil(prod(shape) / 256)].
    """

    codes: UInt8[Array, "..."]
    absmax: Float[Array, "..."]

    def specs(self, spec: P, mesh: Mesh) -> "Blockwise":
        """The PartitionSpecs of the two for an array of this one.

        The magnitudes are split with the array where this is split by rows into whole blocks.

        Args:
            spec: of the array.
            mesh: the mesh.
        """
        stack = self.absmax.ndim - 1
        wanted = [*spec, *[None] * (self.codes.ndim - len(spec))]
        first, *others = wanted[stack:]
        parts = math.prod(mesh.shape[axis] for axis in ((first,) if isinstance(first, str) else first or ()))
        rows_alone = not any(others) and math.prod(self.codes.shape[stack:]) % (parts * BLOCK) == 0
        if first is not None and rows_alone:
            return Blockwise(spec, P(*wanted[:stack], first))  # pyright: ignore[reportArgumentType]
        return Blockwise(spec, P(*wanted[:stack]))  # pyright: ignore[reportArgumentType]


def zeros(shape: tuple[int, ...], stack: int, make: Callable[..., Array] = jnp.zeros) -> Blockwise:
    """An array of zeros.

    Args:
        shape: of the array.
        stack: number of leading axes over separate tensors.
        make: an array of zeros from shape and dtype.
    """
    blocks = -(-math.prod(shape[stack:]) // BLOCK)
    return Blockwise(make(shape, jnp.uint8), make((*shape[:stack], blocks), jnp.float32))


def block_absmax(array: Float[Array, "..."], stack: int) -> Float[Array, "..."]:
    """The largest magnitude of each block, [*stack, blocks].

    Args:
        array: float32.
        stack: number of leading axes over separate tensors.
    """
    return jnp.max(jnp.abs(_in_blocks(array, stack)), axis=-1)


def quantize(array: Float[Array, "..."], absmax: Float[Array, "..."], *, signed: bool) -> Blockwise:
    """Encode an array.

    Args:
        array: float32; not negative unless signed.
        absmax: `block_absmax` of the array.
        signed: use the signed map.
    """
    stack = absmax.ndim - 1
    scaled = _in_blocks(array, stack) / jnp.where(absmax > 0, absmax, 1.0)[..., None]
    encode = _encode_signed if signed else _encode_unsigned
    return Blockwise(_out_of_blocks(encode(scaled).astype(jnp.uint8), array.shape, stack), absmax)


def dequantize(quantized: Blockwise, *, signed: bool) -> Float[Array, "..."]:
    """Decode an array to float32.

    Args:
        quantized: codes and scales.
        signed: the codes are from the signed map.
    """
    stack = quantized.absmax.ndim - 1
    codes = _in_blocks(quantized.codes, stack).astype(jnp.int32)
    values = jnp.asarray(dynamic_map(signed)).at[codes].get(mode="promise_in_bounds")
    return _out_of_blocks(values * quantized.absmax[..., None], quantized.codes.shape, stack)


def _in_blocks(array: Array, stack: int) -> Array:
    """[*stack, *shape] → [*stack, blocks, 256], filled up with zeros."""
    leading, size = array.shape[:stack], math.prod(array.shape[stack:])
    flat = array.reshape(*leading, size)
    if size % BLOCK:
        flat = jnp.pad(flat, [(0, 0)] * stack + [(0, -size % BLOCK)])
    return flat.reshape(*leading, -1, BLOCK)


def _out_of_blocks(blocks: Array, shape: tuple[int, ...], stack: int) -> Array:
    size = math.prod(shape[stack:])
    return blocks.reshape(*shape[:stack], -1)[..., :size].reshape(shape)


def _encode_signed(scaled: Float[Array, "..."]) -> Int[Array, "..."]:
    """Codes 0 … 126 are negative, 127 is zero, the others positive; there is no -1."""
    rank = _nearest_rank(jnp.abs(scaled), points=1, lowest_border=7 / 36)
    return jnp.maximum(127 + jnp.where(scaled > 0, rank, -rank), 0)


def _encode_unsigned(scaled: Float[Array, "..."]) -> Int[Array, "..."]:
    """Code 0 is zero."""
    return _nearest_rank(scaled, points=2, lowest_border=5 / 36)


def _nearest_rank(magnitude: Float[Array, "..."], *, points: int, lowest_border: float) -> Int[Array, "..."]:
    """The rank of the nearest magnitude, from 0 for zero to the highest for 1.

    Decade d of seven reaches from 10^(d - 7) to 10^(d - 6) and is cut into points·2^d equal cells. Their middles are
    the map's values and their edges the borders between these, save for the two at the ends: a border to the decade
    below lies at 0.2 cells, and the one to the value 1 a quarter of a cell below it.

    Args:
        magnitude: in [0, 1].
        points: number of cells in decade 0.
        lowest_border: the border to zero in decade 0, in cells.
    """
    power, cells, rank = jnp.float32(1e6), jnp.float32(points), jnp.int32(1)
    border, top = jnp.float32(lowest_border), jnp.bool_(False)
    for decade in range(1, 7):
        top = magnitude > np.float32(10.0 ** (decade - 7))
        power = jnp.where(top, np.float32(10.0 ** (6 - decade)), power)
        cells = jnp.where(top, np.float32(points * 2**decade), cells)
        rank = jnp.where(top, np.int32(1 + points * (2**decade - 1)), rank)
        border = jnp.where(top, np.float32(0.2), border)
    cell = (magnitude * power - 0.1) * (cells / 0.9)
    inside = jnp.clip(jnp.floor(cell), 0.0, cells - 1.0).astype(jnp.int32)
    above = (top & (cell > cells - 0.25)).astype(jnp.int32)
    below = (cell <= border).astype(jnp.int32)
    return rank + inside + above - below
