"""Gated linear units for XLA's fusions: the residuals are gate and up, the activation is computed again."""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.glu.reference import ACTIVATIONS
from pallas_kernels.transformations import custom_vjp


@custom_vjp(nondiff_argnums=(2,))
def glu(gate: Array, up: Array, activation: str) -> Array:
    """``api.glu`` without its checks."""
    return (ACTIVATIONS[activation](gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)


def _forward(gate: Array, up: Array, activation: str) -> tuple[Array, tuple[Array, Array]]:
    return glu(gate, up, activation), (gate, up)


def _backward(activation: str, residuals: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    gate, up = residuals
    dy32 = dy.astype(jnp.float32)
    activated, vjp = jax.vjp(ACTIVATIONS[activation], gate.astype(jnp.float32))
    (dgate,) = vjp(dy32 * up.astype(jnp.float32))
    return dgate.astype(gate.dtype), (dy32 * activated).astype(up.dtype)


glu.defvjp(_forward, _backward)
