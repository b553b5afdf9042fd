"""The backward pass of a norm before LoRA adapters by XLA, on every device; arguments as in `implementations`."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.low_rank.xla import dot


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
