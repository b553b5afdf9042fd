"""Roundings that the compiler keeps.

XLA is free to compute with more precision than it is asked for: it leaves out a conversion to 16 bits and back, and on
a CPU contracts a product and a sum to one instruction. Both change the bits that a file format defines. Neither an
optimization_barrier (XLA's CPU compiler of jax 0.10.2 drops it before it fuses) nor reduce_precision (removed as an
identity at float32, and without subnormal numbers at float16) helps. So the bits are added to an integer zero that the
compiler cannot know to be zero: "is NaN".
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

_BITS = {1: jnp.int8, 2: jnp.int16, 4: jnp.int32}


def kept(x: Float[Array, "..."], is_nan: Bool[Array, ""]) -> Float[Array, "..."]:
    """The number rounded to its dtype whatever follows.

    Args:
        x: of 8, 16 or 32 bits.
        is_nan: false, as the comparison of a number with itself.
    """
    bits = _BITS[x.dtype.itemsize]
    return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(x, bits) + is_nan.astype(bits), x.dtype)


def round_through(x: Float[Array, "..."], dtype: DTypeLike | None) -> Float[Array, "..."]:
    """A number rounded to the values of another dtype, in its own.

    Args:
        x: float32.
        dtype: bfloat16, float16 or one of 8 bits; None or float32 leaves x as it is.
    """
    if dtype is None or jnp.dtype(dtype) == x.dtype:
        return x
    return kept(x.astype(dtype), x != x).astype(x.dtype)
