"""The projection to queries, keys and values with its adapters, as far as attention, as one differentiable unit.

    [q | k | v] = turn(x·Wᵀ + (x·Aᵀ)·(s·B)ᵀ)

B is applied, and queries and keys are turned by their positions, where x·Wᵀ is read and parted
(`pallas_kernels.split_rope.lora`). The backward pass keeps x and the rank products; a policy that goes by name keeps
the turned heads, which attention's own backward pass needs, and not what they were before.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from fastjax.lora.few_rows import Addends, adapters_of, flat, served
from fastjax.lora.norm import PreparedRows
from fastjax.lora.rank_products import (
    Matrices,
    PartSpec,
    chosen_products,
    drops,
    gradients_of_B,
    into_dtypes,
    rank_product_gradients,
    rank_products,
    stacked_B,
)
from fastjax.lora.units import on_rows, unit
from fastjax.quantization.weights import WeightLike, as_weight
from fastjax.residuals import name_residual
from pallas_kernels import few_rows
from pallas_kernels.float8 import scaled_values
from pallas_kernels.split_rope.lora import split_rope_lora_backward, split_rope_lora_forward


class Operands(NamedTuple):
    """The unit's operands besides its input.

    Attributes:
        weight: [(H + 2K)·D, E].
        cos: cosines of the rotary angles.
        sin: sines of the same.
        matrices: of the adapters.
        key: the layer's dropout key; None switches dropout off.
        prepared: x as `norm` prepares it, which then makes the gradients through A.
    """

    weight: WeightLike
    cos: Float[Array, "B S D/2"]
    sin: Float[Array, "B S D/2"]
    matrices: Matrices
    key: PRNGKeyArray | None
    prepared: PreparedRows | None = None


def project_heads(
    parts: tuple[PartSpec, ...], heads: tuple[int, int], x: Float[Array, "B S E"], arrays: Operands
) -> tuple[Float[Array, "B S H D"], Float[Array, "B S K D"], Float[Array, "B S K D"]]:
    """Queries and keys, turned, and values, in the dtype of x.

    Args:
        parts: queries, keys and values, or one part of all; one at least has an adapter.
        heads: of queries and of keys.
        x: the input, in the dtype of the computation.
        arrays: weight, angles, adapters, key.
    """
    size = 2 * arrays.cos.shape[-1]
    q, k, v = (part.reshape(*x.shape[:2], -1, size) for part in _unit(parts, heads, x, arrays))
    return q, k, v


def _forward(parts: tuple[PartSpec, ...], heads: tuple[int, int], x, arrays: Operands):
    prepared = arrays.prepared
    products, rows = (None, None) if prepared is None else (prepared.added(x.dtype), prepared.rows)
    if products is None:
        products = name_residual(rank_products(parts, arrays.matrices, x, arrays.key), "lora")
    chosen = chosen_products(parts, arrays.matrices, products)
    lora_B = stacked_B(parts, arrays.matrices, x.dtype)

    def turn(base, products, cos, sin, lora_B):
        return split_rope_lora_forward(base, products, lora_B, cos, sin, heads=heads)

    base = as_weight(arrays.weight).matmul_scaled(x if rows is None else rows)  # pyright: ignore[reportArgumentType]
    turned = on_rows(turn, (base, chosen, arrays.cos, arrays.sin), (lora_B,))
    return tuple(name_residual(part, "projection") for part in turned), (x, products, arrays)


def _few(parts: tuple[PartSpec, ...], heads: tuple[int, int], x, arrays: Operands):
    adapters, size, prepared = adapters_of(parts, arrays.matrices), 2 * arrays.cos.shape[-1], arrays.prepared
    if drops(parts, arrays.key) or (prepared is not None and prepared.rows is not None):
        return None
    if size < 32 or size & (size - 1) or not served(x, adapters):
        return None
    rows = flat(x)
    if prepared is not None and isinstance(prepared.products, Addends):
        products = prepared.products.shares
    else:
        products = few_rows.rank_products(rows, adapters)
    base, angles = as_weight(arrays.weight).addends(rows), (flat(arrays.cos), flat(arrays.sin))
    turned = few_rows.heads(base, products, adapters, *angles, counts=heads, dtype=x.dtype)
    return tuple(part.reshape(*x.shape[:-1], -1) for part in turned)


def _backward(parts: tuple[PartSpec, ...], heads: tuple[int, int], residuals, gradients):
    x, products, arrays = residuals
    lora_B = stacked_B(parts, arrays.matrices, x.dtype)
    weight: Any = as_weight(arrays.weight)
    rounded = x.dtype == jnp.bfloat16 and weight.reads_rounded(True)

    def turn_back(dq, dk, dv, products, cos, sin, lora_B):
        dbase, dproducts, dB, rows = split_rope_lora_backward(
            (dq, dk, dv), products, lora_B, cos, sin, heads=heads, rounded=rounded
        )
        return dbase, dproducts, rows, dB

    operands = (*gradients, products, arrays.cos, arrays.sin)
    dbase, dproducts, rows, whole = on_rows(turn_back, operands, (lora_B,), sums=1)
    dx: Any = as_weight(arrays.weight).transposed(dbase) if rows is None else weight.transposed_scaled(rows)
    dx = scaled_values(dx).astype(x.dtype)
    dB, given = gradients_of_B(parts, whole), arrays.prepared is not None
    if given:
        dA = {name: jnp.zeros_like(arrays.matrices[name][0]) for name in dB}
    else:
        dx, dA = rank_product_gradients(parts, arrays.matrices, dx, x, dproducts, arrays.key)
    trained = into_dtypes({name: (dA[name], dB[name]) for name in dB}, arrays.matrices)
    dweight = as_weight(arrays.weight).gradient(dbase, x)
    return dx, Operands(dweight, None, None, trained, None, PreparedRows(dproducts, None) if given else None)  # pyright: ignore


_unit = unit(_forward, _backward, statics=2, few=_few)
