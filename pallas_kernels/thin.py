"""Outer products of vectors as products of thin 16-bit matrices, which the tensor cores make in a Triton kernel.

A tile that a matrix instruction has made, and what is computed with it, lies in registers in the instruction's order.
Vectors along its rows or columns would be brought into that order through shared memory in every tile, at the price of
registers and barriers; their outer product is one more instruction, 16 deep. float32 numbers go in as three numbers of
8 bits each, of which they are the sum, so that the product is exact where both are powers of two and has float32's
precision elsewhere.
"""

import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float32

#: How deep one matrix instruction is.
DEPTH = 16
#: Numbers of 8 bits that a float32's 24 are the sum of.
PARTS = 3


def parts(vector: Float32[Array, " size"]) -> list[Array]:
    """Three bfloat16 vectors, the largest first, whose sum is the given one.

    Args:
        vector: what is infinite is so in the first part alone.
    """
    summands = []
    for _ in range(PARTS):
        summands.append(vector.astype(jnp.bfloat16))
        rest = vector - summands[-1].astype(jnp.float32)
        vector = jnp.where(jnp.isfinite(rest), rest, 0)
    return summands


def side_by_side(columns: list[Array], before: int = 0) -> BFloat16[Array, "size 16"]:
    """A thin matrix with these columns, and 0 in the others.

    Args:
        columns: bfloat16.
        before: columns before them.
    """
    return jnp.pad(jnp.stack(columns, axis=1), ((0, 0), (before, DEPTH - before - len(columns))))
