"""RMSNorm in plain jax.numpy: the oracle. float64 inputs are computed in float64, all others in float32."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(
    x: Float[Array, "*rows E"], weight: Float[Array, " E"], *, eps: float, offset: float = 0.0
) -> Float[Array, "*rows E"]:
    """(weight + offset) · x / sqrt(mean(x²) + eps), in x's dtype; arguments as in ``api.rms_norm``."""
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    x_wide = x.astype(wide)
    normed = x_wide / jnp.sqrt(jnp.mean(x_wide**2, axis=-1, keepdims=True) + eps)
    if offset == 0.0:
        normed = normed.astype(x.dtype).astype(wide)
    scale = (weight.astype(wide) + offset).reshape((1,) * (x.ndim - 1) + weight.shape)
    return (normed * scale).astype(x.dtype)
