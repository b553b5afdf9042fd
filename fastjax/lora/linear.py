"""Projections of one input with their adapters, as one differentiable unit.

    y = c ∘ (x·Wᵀ + (x·Aᵀ)·(s·B)ᵀ) + r        c: DoRA's scale of each output, else 1; r: a residual stream, or nothing

One large product and two of rank R in each direction, whatever the number of parts: A of all parts in one product that
reads x once, B of all parts in the pass that adds the residual stream. The backward pass computes the small dimension
first (dy·B, then ·A), and reads dy, x and dy·W once for both gradients that each gives (`pallas_kernels.low_rank`). It
keeps x and the rank products, but neither a decoded weight nor a dropped copy of x: masks are drawn again. No dense B·A
is formed.
"""

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from fastjax.lora.dropout import drop
from fastjax.lora.few_rows import adapters_of, flat, served
from fastjax.lora.params import LoraLinear
from fastjax.lora.rank_products import (
    Matrices,
    PartSpec,
    add_products,
    chosen_products,
    drops,
    into_dtypes,
    large_product,
    product_gradients,
    rank_product_gradients,
    rank_products,
    stacked_B,
)
from fastjax.lora.units import WHOLE, Tokens, row_slices, unit
from fastjax.quantization.weights import WeightLike, as_weight, matmul, rows_of
from fastjax.residuals import name_residual
from pallas_kernels import few_rows


def project(
    sizes: Sequence[tuple[str, int]],
    weight: WeightLike,
    adapters: Mapping[str, LoraLinear],
    x: Float[Array, "B S in"],
    key: PRNGKeyArray | None,
    dropped: Float[Array, "B S in"] | None = None,
    residual: Float[Array, "B S out"] | None = None,
    tokens: Tokens = WHOLE,
) -> Float[Array, "B S out"]:
    """The parts' outputs side by side, without bias, in the dtype of x; `split_parts` takes them apart.

    Args:
        sizes: (name, output rows) of the parts of `weight`, from the top row down.
        weight: [out, in].
        adapters: of the parts, by name; other names are passed over.
        x: the input, in the dtype of the computation.
        key: the layer's dropout key; None switches dropout off.
        dropped: the adapters' input, from a caller that has drawn the dropout.
        residual: added to the outputs, in the dtype of x.
        tokens: which the outputs have (`PartSpec`).
    """
    lora = {name: adapters[name] for name, _ in sizes if name in adapters}
    if not lora:
        y = tokens.own_sums(matmul(x, weight))
        return name_residual(y if residual is None else residual + y, "projection")
    slices = row_slices(rows for _, rows in sizes)
    pairs = zip(sizes, slices, strict=True)
    scales = {name: lora[name].column_scale(weight, here) for (name, _), here in pairs if name in lora}
    random = dropped is not None or (key is not None and any(adapter.dropout for adapter in lora.values()))
    if random and any(scale is not None for scale in scales.values()):
        assert not tokens.shared, "refused over `tensor`"
        y = _dropped_dora(sizes, weight, lora, scales, x, key, dropped)
        return y if residual is None else residual + y
    parts = describe(sizes, lora, tokens)
    present = {name: scale for name, scale in scales.items() if scale is not None}
    drawn = None if dropped is not None else key
    return _unit(parts, x, residual, dropped, weight, matrices_of(lora), present, drawn)


def _dropped_dora(sizes, weight, adapters, scales, x, key, dropped) -> Array:
    """DoRA scales W and adapter on the dropped input d; W alone sees the rest: W(x - d) is added."""
    outputs = []
    for (name, rows), here in zip(sizes, row_slices(rows for _, rows in sizes), strict=True):
        rows_weight = rows_of(weight, here) if len(sizes) > 1 else weight
        if name not in adapters:
            outputs.append(matmul(x, rows_weight))
            continue
        adapter = adapters[name]
        d = drop(x, key, name, adapter.dropout) if dropped is None else dropped
        undropped = tuple(described._replace(dropout=0.0) for described in describe([(name, rows)], {name: adapter}))
        scaled = _unit(undropped, d, None, None, rows_weight, matrices_of({name: adapter}), {name: scales[name]}, None)
        outputs.append(scaled + matmul(x - d, rows_weight))
    return jnp.concatenate(outputs, axis=-1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def split_parts(y: Float[Array, "B S out"], sizes: Sequence[tuple[str, int]]) -> tuple[Float[Array, "B S rows"], ...]:
    """The columns of each part; the gradient is one concatenation.

    Args:
        y: the parts' outputs side by side.
        sizes: as in `project`; hashable.
    """
    return tuple(y if len(sizes) == 1 else y[..., here] for here in row_slices(rows for _, rows in sizes))


split_parts.defvjp(
    lambda y, sizes: (split_parts(y, sizes), None),
    lambda sizes, _, dys: (dys[0] if len(sizes) == 1 else jnp.concatenate(dys, axis=-1),),
)


def matrices_of(adapters: Mapping[str, LoraLinear]) -> Matrices:
    """A and B by the part's name."""
    return {name: adapter.matrices for name, adapter in adapters.items()}


def describe(
    sizes: Sequence[tuple[str, int]], adapters: Mapping[str, LoraLinear], tokens: Tokens = WHOLE
) -> tuple[PartSpec, ...]:
    """The static description of a weight's parts and their adapters.

    Args:
        sizes: (name, output rows) of each.
        adapters: by the part's name.
        tokens: which their output has (`PartSpec`).
    """

    def part(name: str, rows: int) -> PartSpec:
        if (adapter := adapters.get(name)) is None:
            return PartSpec(name, rows, tokens=tokens)
        rank = adapter.lora_A.get_value().shape[-2]
        return PartSpec(name, rows, rank, adapter.scaling, adapter.dropout, adapter.largest, tokens)

    return tuple(part(name, rows) for name, rows in sizes)


def _forward(parts, x, residual, dropped, weight, matrices, scales, key):
    read = x if dropped is None else dropped
    products = chosen_products(parts, matrices, rank_products(parts, matrices, read, key))
    inner = name_residual(parts[0].tokens.own_sums(products), "lora")
    lora_B = stacked_B(parts, matrices, x.dtype)
    y = add_products(parts, large_product(parts, weight, x, x.dtype), inner, lora_B, None if scales else residual)
    before = y = name_residual(y, "projection")
    if scales:
        y = (before.astype(jnp.float32) * _columns(parts, scales)).astype(x.dtype)
        y = y if residual is None else residual + y
    return y, (x, dropped, inner, before if scales else None, weight, matrices, scales, key, residual is not None)


def _few(parts, x, residual, dropped, weight, matrices, scales, key):
    adapters = adapters_of(parts, matrices)
    if dropped is not None or scales or drops(parts, key) or parts[0].tokens.shared or not served(x, adapters):
        return None
    rows, residual = flat(x), None if residual is None else flat(residual)
    products = few_rows.rank_products(rows, adapters)
    y = few_rows.add(as_weight(weight).addends(rows), products, adapters, residual, dtype=x.dtype)
    return y.reshape(*x.shape[:-1], -1)


def _backward(parts, residuals, dy):
    x, dropped, inner, before, weight, matrices, scales, key, added = residuals
    dresidual = dy if added else None
    dscales = {}
    if scales:
        wide = dy.astype(jnp.float32)
        products = jnp.sum(wide * before.astype(jnp.float32), axis=(0, 1))
        pairs = zip(parts, row_slices(part.rows for part in parts), strict=True)
        dscales = {part.name: products[here] for part, here in pairs}
        dscales = {name: dscales[name] for name in scales}
        dy = (wide * _columns(parts, scales)).astype(dy.dtype)
    dproducts, dB = product_gradients(parts, dy, inner, stacked_B(parts, matrices, dy.dtype))
    dy, dproducts = map(parts[0].tokens.all_of, (dy, dproducts))
    dx, dread = as_weight(weight).transposed(dy), None
    if dropped is None:
        dx, dA = rank_product_gradients(parts, matrices, dx, x, dproducts, key)
    else:
        dread, dA = rank_product_gradients(parts, matrices, jnp.zeros_like(dropped), dropped, dproducts, key)
    gradients = into_dtypes({name: (dA[name], dB[name]) for name in dA}, matrices)
    return dx, dresidual, dread, as_weight(weight).gradient(dy, x), gradients, dscales, None


_unit = unit(_forward, _backward, few=_few)


def _columns(parts: Sequence[PartSpec], scales: Mapping[str, Array]) -> Float[Array, "1 1 out"]:
    """DoRA's factor of every output; 1 without one."""
    ones = [scales.get(part.name, jnp.ones((part.rows,), jnp.float32)) for part in parts]
    return jnp.concatenate(ones)[None, None, :]
