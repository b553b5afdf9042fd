"""NF4 dequantisation in jax.numpy: any target, any order, size and map.

Whole blocks are decoded as rows of 64, so that a scale is a broadcast, not a gather, and the two halves of a block in
the split order are written as they come. XLA makes one fused loop of it.
"""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from pallas_kernels.nf4.codebook import BLOCK, BLOCK_BYTES, NF4_VALUES, num_blocks
from pallas_kernels.rounding import round_through
from pallas_kernels.shard_gather import Shared, whole


# Called outside of a program it would be one an operation, each compiled by itself.
@functools.partial(jax.jit, static_argnames=("shape", "dtype", "order", "through"), inline=True)
def dequantize(
    codes: UInt8[Array, "..."] | Shared,
    absmax: Float[Array, "..."],
    quant_map: Float[Array, " 16"] | None = None,
    *,
    shape: tuple[int, int],
    dtype: DTypeLike,
    order: str,
    through: str | None = None,
) -> Float[Array, "out in"]:
    """The decoded matrix; arguments as in `implementations`."""
    size, blocks = shape[0] * shape[1], num_blocks(shape)
    table = jnp.asarray(NF4_VALUES if quant_map is None else quant_map)
    codes = whole(codes).reshape(-1)
    if codes.size < blocks * BLOCK_BYTES:
        codes = jnp.pad(codes, (0, blocks * BLOCK_BYTES - codes.size))
    # Every byte meets its two shifts by broadcasting, so that the whole is one element-wise loop. Two lookups joined by
    # a concatenation are the same numbers in a kernel that moves an element at a time, 2.7 times slower on an H200.
    shifts = jnp.array([4, 0] if order == "bitsandbytes" else [0, 4], jnp.uint8)
    if order == "bitsandbytes":
        nibbles = (codes.reshape(blocks, BLOCK_BYTES, 1) >> shifts.reshape(1, 1, 2)) & jnp.uint8(15)
    else:
        nibbles = (codes.reshape(blocks, 1, BLOCK_BYTES) >> shifts.reshape(1, 2, 1)) & jnp.uint8(15)
    values = table.at[nibbles.astype(jnp.int32)].get(mode="promise_in_bounds")
    decoded = round_through(values * absmax.reshape(blocks, 1, 1), through).astype(dtype).reshape(-1)
    return (decoded if size == blocks * BLOCK else decoded[:size]).reshape(shape)
