"""Projections of one input with their adapters, as one differentiable unit.

    y = c ∘ (x·Wᵀ + (x·Aᵀ)·(s·B)ᵀ)            c: DoRA's scale of each output, else 1

One large product and two of rank R in each direction, whatever the number of parts: A of all parts in one product that
reads x once, B of all parts in one that is added to the large product where this is written. The backward pass computes
the small dimension first (dy·B, then ·A). It keeps x and the rank products, but neither a decoded weight nor a dropped
copy of x: masks are drawn again. No dense B·A is formed.
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
    block_B,
    into_dtypes,
    over_tokens,
    rank_product_gradients,
    rank_products,
)
from fastjax.quantization.weights import WeightLike, linear, matmul, matmul_transposed, rows_of, weight_gradient
from fastjax.residuals import name_residual


def project(
    sizes: Sequence[tuple[str, int]],
    weight: WeightLike,
    adapters: Mapping[str, LoraLinear],
    x: Float[Array, "B S in"],
    key: PRNGKeyArray | None,
    dropped: Float[Array, "B S in"] | None = None,
) -> Float[Array, "B S out"]:
    """The parts' outputs side by side, without bias, in the dtype of x; `parted` takes them apart.

    Args:
        sizes: (name, output rows) of the parts of `weight`, from the top row down.
        weight: [out, in].
        adapters: of the parts, by name; other names are passed over.
        x: the input, in the dtype of the computation.
        key: the layer's dropout key; None switches dropout off.
        dropped: the adapters' input, from a caller that has drawn the dropout.
    """
    own = {name: adapters[name] for name, _ in sizes if name in adapters}
    if not own:
        return name_residual(matmul(x, weight), "projection")
    scales, start = {}, 0
    for name, rows in sizes:
        if name in own:
            scales[name] = own[name].column_scale(weight, slice(start, start + rows))
        start += rows
    random = dropped is not None or (key is not None and any(adapter.dropout for adapter in own.values()))
    if random and any(scale is not None for scale in scales.values()):
        return _dropped_dora(sizes, weight, own, scales, x, key, dropped)
    parts = describe(sizes, own)
    present = {name: scale for name, scale in scales.items() if scale is not None}
    return _run(parts, x, dropped, weight, matrices_of(own), present, None if dropped is not None else key)


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
        scaled = _run(own, d, None, mine, matrices_of({name: adapter}), {name: scales[name]}, None)
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
def _unit(parts, x, dropped, weight, matrices, scales, key):
    return _forward(parts, x, dropped, weight, matrices, scales, key)[0]


def _forward(parts, x, dropped, weight, matrices, scales, key):
    read = x if dropped is None else dropped
    inner = name_residual(rank_products(parts, matrices, read, key), "lora")
    before = y = name_residual(matmul(x, weight) + linear(inner, block_B(parts, matrices, x.dtype)), "projection")
    if scales:
        y = (before.astype(jnp.float32) * _columns(parts, scales)).astype(x.dtype)
    return y, (x, dropped, inner, before if scales else None, weight, matrices, scales, key)


def _backward(parts, residuals, dy):
    x, dropped, inner, before, weight, matrices, scales, key = residuals
    dscales = {}
    if scales:
        wide = dy.astype(jnp.float32)
        products = jnp.sum(wide * before.astype(jnp.float32), axis=(0, 1))
        dscales = {part.name: products[here] for part, here in zip(parts, _rows(parts), strict=True)}
        dscales = {name: dscales[name] for name in scales}
        dy = (wide * _columns(parts, scales)).astype(dy.dtype)
    dproducts = linear(dy, block_B(parts, matrices, dy.dtype).T)
    dread, dA = rank_product_gradients(parts, matrices, x if dropped is None else dropped, dproducts, key)
    dx = matmul_transposed(dy, weight)
    if dropped is None:
        dx, dread = dx + dread, None
    dB, gradients, start = over_tokens(dy, inner), {}, 0
    for part, here in zip(parts, _rows(parts), strict=True):
        if part.rank:
            gradients[part.name] = dA[part.name], dB[here, start : start + part.rank] * part.scaling
            start += part.rank
    return dx, dread, weight_gradient(dy, x, weight), into_dtypes(gradients, matrices), dscales, None


_unit.defvjp(_forward, _backward)


def _columns(parts: Sequence[Part], scales: Mapping[str, Array]) -> Float[Array, "1 1 out"]:
    """DoRA's factor of every output; 1 without one."""
    ones = [scales.get(part.name, jnp.ones((part.rows,), jnp.float32)) for part in parts]
    return jnp.concatenate(ones)[None, None, :]


def _rows(parts: Sequence[Part]) -> list[slice]:
    ends = [sum(part.rows for part in parts[: number + 1]) for number in range(len(parts))]
    return [slice(end - part.rows, end) for end, part in zip(ends, parts, strict=True)]
