"""Rotary position embedding as complex multiplication: the oracle. float64 inputs are computed in float64."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def rope(
    x: Float[Array, "B S H D"],
    cos: Float[Array, "B S R//2"],
    sin: Float[Array, "B S R//2"],
    *,
    interleaved: bool = False,
) -> Float[Array, "B S H D"]:
    """(x₁ + i·x₂) · (cos + i·sin) for the pairs (x₁, x₂) of each head, in x's dtype; arguments as in ``api.rope``."""
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    turning = 2 * cos.shape[-1]
    turned, rest = x[..., :turning].astype(wide), x[..., turning:]
    first, second = (turned[..., 0::2], turned[..., 1::2]) if interleaved else jnp.split(turned, 2, axis=-1)
    rotation = lax.complex(cos.astype(wide), sin.astype(wide))[:, :, None, :]
    rotated = lax.complex(first, second) * rotation
    return jnp.concatenate([rotated.real.astype(x.dtype), rotated.imag.astype(x.dtype), rest], axis=-1)
