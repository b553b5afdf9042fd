"""Gated linear units (arXiv 2002.05202) for XLA's fusions: gate and up are kept, the activation is computed again."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.glu.reference import ACTIVATIONS
from pallas_kernels.transformations import custom_vjp

__all__ = ["ACTIVATIONS", "glu"]


def glu(
    gate: Float[Array, "*rows F"],
    up: Float[Array, "*rows F"],
    *,
    activation: str,
) -> Float[Array, "*rows F"]:
    """activation(gate) · up, in float32 inside and rounded once.

    The backward pass keeps gate and up and computes the activation again.

    Args:
        gate: operand of the activation.
        up: the other factor; same shape and dtype.
        activation: one of ``ACTIVATIONS``; the names are those of ``hidden_act`` in Hugging Face configs.

    Returns:
        The product in gate's dtype. Differentiable in both.

    Raises:
        ValueError: an unknown activation, or operands that differ in shape or dtype.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"glu: activation must be one of {', '.join(sorted(ACTIVATIONS))}, got {activation!r}")
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            "glu: gate and up must have the same shape and dtype, "
            f"got {gate.dtype}{list(gate.shape)} and {up.dtype}{list(up.shape)}"
        )
    return _glu(gate, up, activation)


@custom_vjp(nondiff_argnums=(2,))
def _glu(gate: Array, up: Array, activation: str) -> Array:
    return (ACTIVATIONS[activation](gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)


def _forward(gate: Array, up: Array, activation: str) -> tuple[Array, tuple[Array, Array]]:
    return _glu(gate, up, activation), (gate, up)


def _backward(activation: str, residuals: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    gate, up = residuals
    dy32 = dy.astype(jnp.float32)
    activated, vjp = jax.vjp(ACTIVATIONS[activation], gate.astype(jnp.float32))
    (dgate,) = vjp(dy32 * up.astype(jnp.float32))
    return dgate.astype(gate.dtype), (dy32 * activated).astype(up.dtype)


_glu.defvjp(_forward, _backward)


def clamped_swiglu(
    gate: Float[Array, "*rows F"], up: Float[Array, "*rows F"], *, limit: float, alpha: float
) -> Float[Array, "*rows F"]:
    """The unit of gpt-oss: (clamp(up, ±limit) + 1) · g · sigmoid(alpha · g) with g = min(gate, limit), rounded once.

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
