"""Rotary position embedding for XLA's fusions.

Autodiff of the plain formula keeps the tables broadcast over the heads in float32. A rotation's transpose is the
rotation by the opposite angle, so the backward pass here is the forward one with −sin, and keeps the tables as given.
"""

import jax
import jax.numpy as jnp
from jax import Array


@jax.custom_vjp
def rope(x: Array, cos: Array, sin: Array) -> Array:
    """``api.rope`` without its checks."""
    return _rotate(x, cos, sin)


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos.astype(jnp.float32)[:, :, None, :], sin.astype(jnp.float32)[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _forward(x: Array, cos: Array, sin: Array) -> tuple[Array, tuple[Array, Array]]:
    return _rotate(x, cos, sin), (cos, sin)


def _backward(residuals: tuple[Array, Array], dy: Array) -> tuple[Array, None, None]:
    cos, sin = residuals
    return _rotate(dy, cos, -sin), None, None


rope.defvjp(_forward, _backward)
