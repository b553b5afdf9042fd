"""Scales of float8_e4m3fn rows: powers of two.

A power of two leaves the three bits of a mantissa as they are, whatever the row's maximum, so it is as precise as
another scale: of the format's eighteen binades a row loses less than one. Scaling by it is exact in float32 and in
bfloat16: a product's bfloat16 result is rounded once, and codes do not depend on how a device divides.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

#: The largest finite float8_e4m3fn, 1.75 · 2⁸.
MAX = 448.0
_EXPONENT, _MANTISSA, _INFINITY = 8, 23, 0x7F800000
# Added to the bits of a float32, it carries into the exponent where the mantissa is above 1.75.
_ABOVE = 0x1FFFFF
# The smallest scale, 2⁻¹¹⁸, whose inverse is a normal number.
_LEAST = 17


def scale_of(absmax: Float[Array, "..."]) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """The smallest power of two s with absmax / s ≤ 448, and 1 / s.

    Args:
        absmax: float32, none below 0; for infinity s is infinity, so that a product with it is not finite either.

    Returns:
        s and 1 / s, float32, in the shape of `absmax`; at least 2⁻¹¹⁸.
    """
    bits = jax.lax.bitcast_convert_type(absmax, jnp.int32)
    exponent = jnp.maximum((bits + _ABOVE) >> _MANTISSA, _LEAST)
    own = jnp.where(bits >= _INFINITY, _INFINITY, (exponent - _EXPONENT) << _MANTISSA)
    inverse = (254 + _EXPONENT - exponent) << _MANTISSA
    return jax.lax.bitcast_convert_type(own, jnp.float32), jax.lax.bitcast_convert_type(inverse, jnp.float32)


def exponent_of(scale: Float[Array, "..."]) -> UInt8[Array, "..."]:
    """The biased exponent of a power of two.

    Args:
        scale: float32, normal or infinite.
    """
    return (jax.lax.bitcast_convert_type(scale, jnp.int32) >> _MANTISSA).astype(jnp.uint8)


def scale_from(exponent: UInt8[Array, "..."] | Int[Array, "..."]) -> Float[Array, "..."]:
    """The power of two that `exponent_of` has read, float32.

    Args:
        exponent: biased.
    """
    return jax.lax.bitcast_convert_type(exponent.astype(jnp.int32) << _MANTISSA, jnp.float32)
