"""Rotary position embedding for XLA's fusions.

Autodiff of the plain formula keeps the tables broadcast over the heads in float32. A rotation's transpose is the
rotation by the opposite angle, so the backward pass here is the forward one with −sin, and keeps the tables as given.
"""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.transformations import custom_vjp


def rope(x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    """``api.rope`` without its checks."""
    return _rope(x, cos, sin, interleaved)  # pyright: ignore[reportReturnType]


def transpose(dy: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    """The gradient of x from that of ``rope``."""
    half = cos.shape[-1]
    turned = _rotate(dy[..., : 2 * half], cos, -sin)
    if interleaved:
        turned = turned.reshape(*dy.shape[:3], 2, half).swapaxes(-1, -2).reshape(turned.shape)
    return _joined(turned, dy)


@custom_vjp(nondiff_argnums=(3,))
def _rope(x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    half = cos.shape[-1]
    turned = x[..., : 2 * half]
    if interleaved:
        turned = turned.reshape(*x.shape[:3], half, 2).swapaxes(-1, -2).reshape(turned.shape)
    return _joined(_rotate(turned, cos, sin), x)


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos.astype(jnp.float32)[:, :, None, :], sin.astype(jnp.float32)[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _joined(turned: Array, x: Array) -> Array:
    """The turned features, and those of x behind them."""
    size = turned.shape[-1]
    return turned if size == x.shape[-1] else jnp.concatenate([turned, x[..., size:]], axis=-1)


def _forward(x: Array, cos: Array, sin: Array, interleaved: bool) -> tuple[Array, tuple[Array, Array]]:
    return _rope(x, cos, sin, interleaved), (cos, sin)


def _backward(interleaved: bool, residuals: tuple[Array, Array], dy: Array) -> tuple[Array, None, None]:
    return transpose(dy, *residuals, interleaved), None, None


_rope.defvjp(_forward, _backward)
