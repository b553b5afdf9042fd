"""The way from projection to attention by XLA around the sums of `low_rank`; arguments as in `implementations`."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.low_rank import low_rank_add, low_rank_output_gradients
from pallas_kernels.rope.xla import rope


def forward(
    base: Array, products: Array, lora_B: Array, cos: Array, sin: Array, heads: tuple[int, int], implementation: str
) -> tuple[Array, Array, Array]:
    """Queries and keys, turned, and values; the sums by `implementation` of `low_rank`."""
    parts = _parts(products, lora_B, heads, 2 * cos.shape[1])
    y = low_rank_add(base, products, lora_B, parts=parts, implementation=implementation)
    first, second = heads[0] * 2 * cos.shape[1], sum(heads) * 2 * cos.shape[1]
    q, k, v = jnp.split(y, [first, second], axis=1)
    return turned(q, cos, sin), turned(k, cos, sin), v


def backward(
    dq: Array,
    dk: Array,
    dv: Array,
    products: Array,
    lora_B: Array,
    cos: Array,
    sin: Array,
    heads: tuple[int, int],
    implementation: str | None,
) -> tuple[Array, Array, Array]:
    """The gradients of base, products and B; the last two by `implementation` of `low_rank`."""
    dbase = jnp.concatenate([turned(dq, cos, -sin), turned(dk, cos, -sin), dv], axis=1)
    parts = _parts(products, lora_B, heads, 2 * cos.shape[1])
    return dbase, *low_rank_output_gradients(dbase, products, lora_B, parts=parts, implementation=implementation)


def turned(x: Array, cos: Array, sin: Array) -> Array:
    """The heads of each token, turned by its angles."""
    rows, size = x.shape[0], 2 * cos.shape[1]
    return rope(x.reshape(1, rows, -1, size), cos[None], sin[None]).reshape(x.shape)


def _parts(products: Array, lora_B: Array, heads: tuple[int, int], size: int) -> tuple[int, ...]:
    """The columns of each part that has products of its own."""
    queries, keys = heads
    if products.shape[1] == lora_B.shape[1]:
        return ((queries + 2 * keys) * size,)
    return queries * size, keys * size, keys * size
