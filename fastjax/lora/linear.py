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
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from fastjax.lora.dropout import drop
from fastjax.lora.params import LoraLinear
from fastjax.lora.rank_products import (
    Matrices,
    Part,
    add_products,
    into_dtypes,
    product_gradients,
    rank_product_gradients,
    rank_products,
    slot,
    stacked_B,
)
from fastjax.quantization.weights import WeightLike, as_weight, matmul, rows_of
from fastjax.residuals import name_residual


def project(
    sizes: Sequence[tuple[str, int]],
    weight: WeightLike,
    adapters: Mapping[str, LoraLinear],
    x: Float[Array, "B S in"],
    key: PRNGKeyArray | None,
    dropped: Float[Array, "B S in"] | None = None,
    residual: Float[Array, "B S out"] | None = None,
) -> Float[Array, "B S out"]:
    """The parts' outputs side by side, without bias, in the dtype of x; `parted` takes them apart.

    Args:
        sizes: (name, output rows) of the parts of `weight`, from the top row down.
        weight: [out, in].
        adapters: of the parts, by name; other names are passed over.
        x: the input, in the dtype of the computation.
        key: the layer's dropout key; None switches dropout off.
        dropped: the adapters' input, from a caller that has drawn the dropout.
        residual: added to the outputs, in the dtype of x.
    """
    own = {name: adapters[name] for name, _ in sizes if name in adapters}
    if not own:
        y = matmul(x, weight)
        return name_residual(y if residual is None else residual + y, "projection")
    scales, start = {}, 0
    for name, rows in sizes:
        if name in own:
            scales[name] = own[name].column_scale(weight, slice(start, start + rows))
        start += rows
    random = dropped is not None or (key is not None and any(adapter.dropout for adapter in own.values()))
    if random and any(scale is not None for scale in scales.values()):
        y = _dropped_dora(sizes, weight, own, scales, x, key, dropped)
        return y if residual is None else residual + y
    parts = describe(sizes, own)
    present = {name: scale for name, scale in scales.items() if scale is not None}
    drawn = None if dropped is not None else key
    return _run(parts, x, residual, dropped, weight, matrices_of(own), present, drawn)


def _dropped_dora(sizes, weight, adapters, scales, x, key, dropped) -> Array:
    """DoRA scales W and adapter on the dropped input d; W alone sees the rest: W(x - d) is added."""
    outputs, start = [], 0
    for name, rows in sizes:
        mine = rows_of(weight, slice(start, start + rows)) if len(sizes) > 1 else weight
        start += rows
        if name not in adapters:
            outputs.append(matmul(x, mine))
            continue
        adapter = adapters[name]
        d = drop(x, key, name, adapter.dropout) if dropped is None else dropped
        own = tuple(described._replace(dropout=0.0) for described in describe([(name, rows)], {name: adapter}))
        scaled = _run(own, d, None, None, mine, matrices_of({name: adapter}), {name: scales[name]}, None)
        outputs.append(scaled + matmul(x - d, mine))
    return jnp.concatenate(outputs, axis=-1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def parted(y: Float[Array, "B S out"], sizes: Sequence[tuple[str, int]]) -> tuple[Float[Array, "B S rows"], ...]:
    """The columns of each part; the gradient is one concatenation.

    Args:
        y: the parts' outputs side by side.
        sizes: as in `project`; hashable.
    """
    outputs, start = [], 0
    for _, rows in sizes:
        outputs.append(y if len(sizes) == 1 else y[..., start : start + rows])
        start += rows
    return tuple(outputs)


parted.defvjp(
    lambda y, sizes: (parted(y, sizes), None),
    lambda sizes, _, dys: (dys[0] if len(sizes) == 1 else jnp.concatenate(dys, axis=-1),),
)


def matrices_of(adapters: Mapping[str, LoraLinear]) -> Matrices:
    """A and B by the part's name."""
    return {name: (adapter.lora_A[...], adapter.lora_B[...]) for name, adapter in adapters.items()}


def describe(sizes: Sequence[tuple[str, int]], adapters: Mapping[str, LoraLinear]) -> tuple[Part, ...]:
    """The static description of a weight's parts and their adapters.

    Args:
        sizes: (name, output rows) of each.
        adapters: by the part's name.
    """
    found = []
    for name, rows in sizes:
        part, adapter = Part(name, rows), adapters.get(name)
        if adapter is not None:
            rank = adapter.lora_A[...].shape[0]
            part = Part(name, rows, rank, adapter.scaling, adapter.dropout)
        found.append(part)
    return tuple(found)


def _run(parts, *arguments: Any) -> Array:
    return _unit(parts, *arguments)  # pyright: ignore[reportReturnType]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _unit(parts, x, residual, dropped, weight, matrices, scales, key):
    return _forward(parts, x, residual, dropped, weight, matrices, scales, key)[0]


def _forward(parts, x, residual, dropped, weight, matrices, scales, key):
    read = x if dropped is None else dropped
    rank = slot(parts)
    inner = name_residual(rank_products(parts, matrices, read, key, rank), "lora")
    lora_B = stacked_B(parts, matrices, x.dtype, rank)
    y = add_products(parts, as_weight(weight).matmul_scaled(x), inner, lora_B, None if scales else residual)
    before = y = name_residual(y, "projection")
    if scales:
        y = (before.astype(jnp.float32) * _columns(parts, scales)).astype(x.dtype)
        y = y if residual is None else residual + y
    return y, (x, dropped, inner, before if scales else None, weight, matrices, scales, key, residual is not None)


def _backward(parts, residuals, dy):
    x, dropped, inner, before, weight, matrices, scales, key, added = residuals
    dresidual = dy if added else None
    dscales = {}
    if scales:
        wide = dy.astype(jnp.float32)
        products = jnp.sum(wide * before.astype(jnp.float32), axis=(0, 1))
        dscales = {part.name: products[here] for part, here in zip(parts, _rows(parts), strict=True)}
        dscales = {name: dscales[name] for name in scales}
        dy = (wide * _columns(parts, scales)).astype(dy.dtype)
    dproducts, dB = product_gradients(parts, dy, inner, stacked_B(parts, matrices, dy.dtype, slot(parts)))
    dx, dread = as_weight(weight).transposed(dy), None
    if dropped is None:
        dx, dA = rank_product_gradients(parts, matrices, dx, x, dproducts, key)
    else:
        dread, dA = rank_product_gradients(parts, matrices, jnp.zeros_like(dropped), dropped, dproducts, key)
    gradients = into_dtypes({name: (dA[name], dB[name]) for name in dA}, matrices)
    return dx, dresidual, dread, as_weight(weight).gradient(dy, x), gradients, dscales, None


_unit.defvjp(_forward, _backward)


def _columns(parts: Sequence[Part], scales: Mapping[str, Array]) -> Float[Array, "1 1 out"]:
    """DoRA's factor of every output; 1 without one."""
    ones = [scales.get(part.name, jnp.ones((part.rows,), jnp.float32)) for part in parts]
    return jnp.concatenate(ones)[None, None, :]


def _rows(parts: Sequence[Part]) -> list[slice]:
    ends = [sum(part.rows for part in parts[: number + 1]) for number in range(len(parts))]
    return [slice(end - part.rows, end) for end, part in zip(ends, parts, strict=True)]
