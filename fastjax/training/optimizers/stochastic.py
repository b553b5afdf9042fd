"""Rounding to bfloat16 up or down with the chances that keep the mean (Gupta et al., arXiv 1502.02551)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Int


def round_stochastically(
    pair: tuple[Float[Array, "..."], Float[Array, "..."]], draw: Int[Array, ""]
) -> tuple[BFloat16[Array, "..."], BFloat16[Array, "..."]]:
    """Of each number one of its two neighbours in bfloat16, the nearer one more often.

    The random bits are a hash of the draw and of the number's place in the last two axes, so that layers in a stack are
    rounded as they would be by themselves, on any number of devices; its lower half is for the first array, its upper
    half for the second.

    Args:
        pair: float32, finite, of one shape.
        draw: another one gives other random bits.
    """
    shape = pair[0].shape
    rows, columns = (jax.lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in (len(shape) - 2, len(shape) - 1))
    noise = _hash((rows * jnp.uint32(shape[-1]) + columns) ^ _hash(draw.astype(jnp.uint32)))
    return _rounded(pair[0], noise & jnp.uint32(0xFFFF)), _rounded(pair[1], noise >> 16)


def _rounded(x: Array, noise: Array) -> Array:
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + noise  # a carry into the upper half rounds up
    kept = bits & jnp.uint32(0xFFFF0000)
    return jax.lax.bitcast_convert_type(kept, jnp.float32).astype(jnp.bfloat16)


def _hash(x: Array) -> Array:
    """A bijection of 32 bits whose results look independent (C. Wellons, "lowbias32", 2018)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
