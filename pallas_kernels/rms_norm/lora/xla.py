"""A norm before LoRA adapters by XLA, on every device; arguments as in `api`."""

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from pallas_kernels.float8.api import quantize_rows
from pallas_kernels.float8.scaled import Rounded
from pallas_kernels.low_rank.xla import dot
from pallas_kernels.rms_norm.xla import forward


def backward(
    x: Array,
    scale: Array,
    rstd: Array,
    mean: Array,
    lora_A: Array,
    dresidual: Array,
    dnormed: Array,
    dproducts: Array,
) -> tuple[Array, Array]:
    """The gradients of x and A."""
    dnormed = dnormed + dot(dproducts, lora_A, ((1,), (0,)))
    unit, g = x.astype(jnp.float32) * rstd[:, None], dnormed.astype(jnp.float32) * scale[None]
    dx = dresidual + (rstd[:, None] * (g - unit * mean[:, None])).astype(x.dtype)
    return dx, dot(dproducts, (unit * scale[None]).astype(x.dtype), ((0,), (0,)), jnp.float32)


def round_rows(x: Array, weight: Array, lora_A: Array, eps: ArrayLike, offset: float) -> tuple[Rounded, Array, Array]:
    """The normalised rows in float8, their rank products, rstd."""
    normed, rstd = forward(x, weight, eps, offset)
    return quantize_rows(normed), dot(normed, lora_A, ((1,), (1,))), rstd[:, 0]
