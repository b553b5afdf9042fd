"""RMSNorm for XLA's fusions, with a backward pass written by hand.

Autodiff of the plain formula keeps float32 copies of x between the passes. The residuals here are x itself, in its own
dtype, and the reciprocal root mean square of each row. With n = x · rstd and g = dy · (weight + offset):

    dx = rstd · (g − n · mean(g · n))        dweight = Σ_rows dy · n
"""

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from pallas_kernels.transformations import custom_vjp


@custom_vjp(nondiff_argnums=(3,))
def rms_norm(x: Array, weight: Array, eps: ArrayLike, offset: float) -> Array:
    """``api.rms_norm`` without its checks."""
    return forward(x, weight, eps, offset)[0]


def forward(x: Array, weight: Array, eps: ArrayLike, offset: float) -> tuple[Array, Array]:
    """The normalised rows, and the reciprocal root mean square of each, [*rows, 1]."""
    x32 = x.astype(jnp.float32)
    rstd = lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)  # [*rows, 1]
    normed = x32 * rstd
    if offset == 0.0:
        normed = normed.astype(x.dtype).astype(jnp.float32)
    return (normed * scale_of(weight, offset, x.ndim)).astype(x.dtype), rstd


def backward(
    x: Array, weight: Array, rstd: Array, dresidual: Array | None, dy: Array, offset: float
) -> tuple[Array, Array]:
    """The gradients of x, with that beside the norm if there is one, and of the weight in float32."""
    dy32 = dy.astype(jnp.float32)
    normed = x.astype(jnp.float32) * rstd
    g = dy32 * scale_of(weight, offset, x.ndim)
    dx = rstd * (g - normed * jnp.mean(g * normed, axis=-1, keepdims=True))
    dweight = jnp.sum(dy32 * normed, axis=tuple(range(x.ndim - 1)))
    dx = dx.astype(x.dtype)
    return dx if dresidual is None else dresidual + dx, dweight


def _forward(x: Array, weight: Array, eps: ArrayLike, offset: float) -> tuple[Array, tuple[Array, Array, Array]]:
    normed, rstd = forward(x, weight, eps, offset)
    return normed, (x, weight, rstd)


def _backward(offset: float, residuals: tuple[Array, Array, Array], dy: Array) -> tuple[Array, Array, None]:
    x, weight, rstd = residuals
    dx, dweight = backward(x, weight, rstd, None, dy, offset)
    return dx, dweight.astype(weight.dtype), None


def scale_of(weight: Array, offset: float, ndim: int) -> Array:
    """The float32 scale with as many axes as x: rank promotion stays explicit."""
    return (weight.astype(jnp.float32) + offset).reshape((1,) * (ndim - 1) + weight.shape)


rms_norm.defvjp(_forward, _backward)
