"""The sums of `low_rank` and the turn of `split_rope`, one after the other; arguments as in `api`."""

import math

from jax import Array

from pallas_kernels.float8.scaled import Rounded, Scaled
from pallas_kernels.low_rank import low_rank_add, low_rank_output_gradients
from pallas_kernels.split_rope import REGISTRY


def forward(
    base: Array | Scaled,
    products: Array,
    lora_B: Array,
    cos: Array,
    sin: Array,
    heads: tuple[int, int],
    implementation: str,
) -> tuple[Array, Array, Array]:
    """Queries and keys, turned, and values; both steps by `implementation`."""
    parts = _parts(products, lora_B, heads, 2 * cos.shape[1])
    y = low_rank_add(base, products, lora_B, parts=parts, implementation=implementation)
    turn = REGISTRY.chosen(implementation, dtype=y.dtype, size=2 * cos.shape[1])
    q, k, v = turn.forward(y[None], (cos[None], sin[None]), None, heads, False)
    q, k, v = (part.reshape(y.shape[0], math.prod(part.shape[2:])) for part in (q, k, v))
    return q, k, v


def backward(
    dq: Array,
    dk: Array,
    dv: Array,
    products: Array,
    lora_B: Array,
    cos: Array,
    sin: Array,
    heads: tuple[int, int],
    rounded: bool,
    implementation: str | None,
) -> tuple[Array, Array, Array, Rounded | None]:
    """The gradients of base, products and B, and the first in float8; by `implementation`, or by each step's choice."""
    (rows, size), (queries, keys) = (dq.shape[0], 2 * cos.shape[1]), heads
    turn = REGISTRY.chosen(implementation, dtype=dq.dtype, size=size)
    by_head = tuple(array.reshape(1, rows, count, size) for array, count in ((dq, queries), (dk, keys), (dv, keys)))
    [dbase], absmax = turn.backward(by_head, (cos[None], sin[None]), None, False, rounded)
    parts, absmax = _parts(products, lora_B, heads, size), None if absmax is None else absmax[0]
    gradients = low_rank_output_gradients(
        dbase, products, lora_B, parts=parts, absmax=absmax, implementation=implementation
    )
    return dbase, *gradients


def _parts(products: Array, lora_B: Array, heads: tuple[int, int], size: int) -> tuple[int, ...]:
    """The columns of each part that has products of its own."""
    queries, keys = heads
    if products.shape[1] == lora_B.shape[1]:
        return ((queries + 2 * keys) * size,)
    return queries * size, keys * size, keys * size
