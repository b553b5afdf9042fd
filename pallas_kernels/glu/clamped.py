"""The clamped gated unit of gpt-oss."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def clamped_swiglu(
    gate: Float[Array, "*rows F"], up: Float[Array, "*rows F"], *, limit: float, alpha: float
) -> Float[Array, "*rows F"]:
    """(clamp(up, ±limit) + 1) · g · sigmoid(alpha · g) with g = min(gate, limit), in float32 and rounded once.

    Args:
        gate: operand of the activation.
        up: the other factor; same shape and dtype.
        limit: bound of both.
        alpha: slope of the sigmoid.

    Returns:
        The product in gate's dtype. Differentiable in both, with zero where they are clamped.
    """
    wide = jnp.float64 if gate.dtype == jnp.float64 else jnp.float32
    g, u = gate.astype(wide), up.astype(wide)
    g, u = jnp.where(g > limit, limit, g), jnp.where(jnp.abs(u) > limit, jnp.sign(u) * limit, u)  # NaN stays
    return ((u + 1) * g * jax.nn.sigmoid(alpha * g)).astype(gate.dtype)
