"""The sums with low-rank products for XLA, on every device; arguments as in `api`."""

import itertools

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.float8.api import quantize_rows
from pallas_kernels.float8.scaled import Rounded, Scaled, scaled_values


def add(residual: Array | None, base: Array | Scaled, products: Array, lora_B: Array, parts: tuple[int, ...]) -> Array:
    """The sum, of addends in the dtype of `base`."""
    if isinstance(base, Scaled):
        base = scaled_values(base).astype(base.product.dtype)
    total = base + dot(products, block_matrix(lora_B, parts), ((1,), (1,)), base.dtype)
    return (total if residual is None else residual.astype(base.dtype) + total).astype(products.dtype)


def output_gradients(
    dy: Array, products: Array, lora_B: Array, parts: tuple[int, ...], absmax: Array | None
) -> tuple[Array, Array, Rounded | None]:
    """The gradients of the products and of B, and dy in float8: its kernel finds the rows' largest as it reads them."""
    rank = lora_B.shape[1]
    whole = dot(dy, products, ((0,), (0,)), jnp.float32)
    own = [whole[rows, number * rank : (number + 1) * rank] for number, rows in enumerate(_rows(parts))]
    rounded = None if absmax is None else quantize_rows(dy)
    return dot(dy, block_matrix(lora_B, parts), ((1,), (0,))), jnp.concatenate(own), rounded


def input_gradients(dx: Array, x: Array, dproducts: Array, lora_A: Array) -> tuple[Array, Array]:
    """The gradients of x and A."""
    return dx + dot(dproducts, lora_A, ((1,), (0,))), dot(dproducts, x, ((0,), (0,)), jnp.float32)


def round_rows(dy: Array, absmax: Array, lora_B: Array, parts: tuple[int, ...]) -> tuple[Array, Rounded]:
    """The gradient of the products, and dy in float8."""
    del absmax
    return dot(dy, block_matrix(lora_B, parts), ((1,), (0,))), quantize_rows(dy)


def block_matrix(lora_B: Array, parts: tuple[int, ...]) -> Array:
    """B with the columns of each part beside those of the others, [F, P·R]."""
    rank, last = lora_B.shape[1], len(parts) - 1
    blocks = [
        jnp.pad(lora_B[rows], ((0, 0), (number * rank, (last - number) * rank)))
        for number, rows in enumerate(_rows(parts))
    ]
    return jnp.concatenate(blocks)


def _rows(parts: tuple[int, ...]) -> list[slice]:
    return [slice(*ends) for ends in itertools.pairwise(itertools.accumulate(parts, initial=0))]


def dot(x: Array, y: Array, contract, dtype=None) -> Array:
    """A product of two matrices, in float32 as precise as float32."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(x, y, (contract, ((), ())), precision=precision, preferred_element_type=dtype)
