"""Rotary position embedding as complex multiplication: the oracle. float64 inputs are computed in float64."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def rope(
    x: Float[Array, "B S H D"], cos: Float[Array, "B S D//2"], sin: Float[Array, "B S D//2"]
) -> Float[Array, "B S H D"]:
    """(x₁ + i·x₂) · (cos + i·sin) for the halves x₁, x₂ of each head, in x's dtype; arguments as in ``api.rope``."""
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    first, second = jnp.split(x.astype(wide), 2, axis=-1)
    rotation = lax.complex(cos.astype(wide), sin.astype(wide))[:, :, None, :]
    rotated = lax.complex(first, second) * rotation
    return jnp.concatenate([rotated.real, rotated.imag], axis=-1).astype(x.dtype)
