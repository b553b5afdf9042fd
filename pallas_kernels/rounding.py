"""Roundings that the compiler keeps.

XLA is free to compute with more precision than it is asked for: it leaves out a conversion to 16 bits and back, and on
a CPU contracts a product and a sum to one instruction. Both change the bits that a file format defines. Neither an
optimization_barrier (XLA's CPU compiler of jax 0.10.2 drops it before it fuses) nor reduce_precision (removed as an
identity at float32, and without subnormal numbers at float16) helps. So the bits are added to an integer zero that the
compiler cannot know to be zero: "is NaN".

On a GPU XLA divides with PTX's ``div.full``, which is off by one in the last place in a quarter of all cases and by
two in some (openxla/xla issue 37181). `quotient` is what IEEE 754 says.
"""

import functools

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


def quotient(x: Float[Array, "..."], divisor: Float[Array, "..."] | float) -> Float[Array, "..."]:
    """X / divisor, correctly rounded on every device.

    Args:
        x: float32.
        divisor: float32, of a shape that broadcasts to x's. XLA would multiply by the reciprocal of one that serves
            several numbers.

    Returns:
        The quotient; where it, x or the divisor is not between 2⁻⁷⁰ and 2¹⁰⁰, as the device divides.
    """
    divisor = kept(jnp.broadcast_to(jnp.float32(divisor), x.shape), x != x)
    return nearest_quotient(x, divisor, nearest_quotient(x, divisor, x / divisor))


def nearest_quotient(
    x: Float[Array, "..."], divisor: Float[Array, "..."], near: Float[Array, "..."]
) -> Float[Array, "..."]:
    """The float32 nearest to x / divisor, from one that is it or its neighbour (`quotient`); else one place nearer.

    What is left of a neighbour, x − near · divisor, is exact: of halves of 12 bits all products are, fused with the
    subtraction or not (Dekker, 1971). A quotient never lies in the middle of two numbers.
    """
    (a, b), (c, d) = _halves(near), _halves(divisor)
    rest = x - a * c - a * d - b * c - b * d
    step = jnp.where((rest < 0) == (x < 0), 1, -1)
    other = jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(near, jnp.int32) + step, jnp.float32)
    nearer = 2.0 * jnp.abs(rest) > jnp.abs((other - near) * divisor)
    sizes = [jnp.abs(number) for number in (x, divisor, near)]
    smallest, largest = functools.reduce(jnp.minimum, sizes), functools.reduce(jnp.maximum, sizes)
    return jnp.where(nearer & (smallest > 2.0**-70) & (largest < 2.0**100), other, near)


def _halves(x: Float[Array, "..."]) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    high = jax.lax.bitcast_convert_type(bits & -4096, jnp.float32)
    return high, x - high
