"""The routing of a few tokens in Pallas-Triton: from logits to weights, experts and items, in one program.

A tile of tokens and experts holds what each token chose. Its sums along the tokens number an expert's pairs, those of
the items along the experts number the items: no sort, and each pair is written to its place.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.few_experts.tile import iota, over
from pallas_kernels.moe_routing import RouterSettings

MOST_ELEMENTS = 8192
"""Logits of all tokens that a program's registers hold beside the places of its items."""


@functools.partial(jax.jit, static_argnames=("settings", "most", "slots", "interpret"))
def route(
    logits: Array,
    choice_bias: Array | None,
    *,
    settings: RouterSettings,
    most: int,
    slots: int,
    interpret: bool = False,
) -> tuple[Array, Array, Array, Array]:
    """Weights and experts of each token; the table of items [most, 1 + slots], and how many of them are in use."""
    shape = logits.shape[0], settings.experts_per_token
    results = jax.ShapeDtypeStruct(shape, logits.dtype), jax.ShapeDtypeStruct(shape, jnp.int32)
    kernel = functools.partial(_route, settings=settings)
    return _call(kernel, (*results, *_items_shapes(most, slots)), logits.shape, "few_experts_route", interpret)(
        logits, choice_bias
    )


def _route(logits_ref, bias_ref, weights_ref, experts_ref, table_ref, count_ref, *, settings: RouterSettings):
    (tokens, num_experts), count = logits_ref.shape, settings.experts_per_token
    token, expert = (iota(pl.next_power_of_2(size)) for size in (tokens, num_experts))
    inside = (token < tokens)[:, None] & (expert < num_experts)[None, :]
    row, column, here = over(token[:, None], expert[None, :], inside)
    logits = pltriton.load(logits_ref.at[row, column], mask=here, other=-jnp.inf)
    scores = logits if settings.score_after else _score(logits, settings.score)
    choice = scores
    if bias_ref is not None:
        choice += pltriton.load(bias_ref.at[expert], mask=expert < num_experts, other=0.0)[None, :]
    choice = jnp.where(choice == choice, choice, -jnp.inf)  # NaN is chosen last
    taken, order, place = column >= num_experts, jnp.zeros_like(column), iota(pl.next_power_of_2(count))[None, :]
    weights, chosen = (jnp.zeros((len(token), place.size), dtype) for dtype in (jnp.float32, jnp.int32))
    for number in range(count):
        best = jnp.max(jnp.where(taken, -jnp.inf, choice), axis=1)[:, None]
        own = jnp.min(jnp.where(taken | (choice < best), num_experts, column), axis=1)[:, None]
        now = column == own
        score = best if bias_ref is None else jnp.sum(jnp.where(now, scores, 0.0), axis=1)[:, None]
        weights, chosen = jnp.where(place == number, score, weights), jnp.where(place == number, own, chosen)
        order, taken = jnp.where(now, number, order), taken | now
    inside = place < count
    if settings.score_after:
        weights = _score(jnp.where(inside, weights, -jnp.inf), settings.score)
    if settings.normalize:
        weights /= jnp.sum(jnp.where(inside, weights, 0.0), axis=1)[:, None] + 1e-20
    row, column, mask = over(token[:, None], place, (token < tokens)[:, None] & inside)
    pltriton.store(weights_ref.at[row, column], weights * settings.scale, mask=mask)
    pltriton.store(experts_ref.at[row, column], chosen, mask=mask)
    _store_items(table_ref, count_ref, taken & here, order, count)


@functools.partial(jax.jit, static_argnames=("most", "slots", "num_experts", "interpret"))
def items(experts: Array, *, most: int, slots: int, num_experts: int, interpret: bool = False) -> tuple[Array, Array]:
    """The table of items [most, 1 + slots], and how many of them are in use."""
    kernel, shape = functools.partial(_items, num_experts=num_experts), (len(experts), num_experts)
    return _call(kernel, _items_shapes(most, slots), shape, "few_experts_items", interpret)(experts)


def _items(experts_ref, table_ref, count_ref, *, num_experts: int):
    tokens, count = experts_ref.shape
    token, expert = (iota(pl.next_power_of_2(size)) for size in (tokens, num_experts))
    order = jnp.full((len(token), len(expert)), -1, jnp.int32)
    for number in range(count):
        place = token, jnp.full(token.shape, number, jnp.int32)
        own = pltriton.load(experts_ref.at[place], mask=token < tokens, other=-1)
        order = jnp.where(own[:, None] == expert[None, :], number, order)
    _store_items(table_ref, count_ref, order >= 0, order, count)


def _store_items(table_ref, count_ref, chosen: Array, order: Array, count: int) -> None:
    """Write the items of a choice.

    Args:
        table_ref: [I, 1 + slots].
        count_ref: [1].
        chosen: whether a token chose an expert, [tokens, experts].
        order: as which of its `count` experts.
        count: experts of a token.
    """
    slots, (tokens, experts) = table_ref.shape[1] - 1, chosen.shape
    ones, expert = chosen.astype(jnp.int32), iota(experts)
    rank = jnp.zeros_like(ones) if tokens == 1 else jnp.cumsum(ones, axis=0) - ones
    size = jnp.sum(ones, axis=0)
    parts = jax.lax.div(size + (slots - 1), jnp.int32(slots))
    first = jnp.cumsum(parts, axis=0) - parts
    pair = iota(tokens)[:, None] * count + order
    item = first[None, :] + jax.lax.div(rank, jnp.int32(slots))
    _put(table_ref, item, 1 + jax.lax.rem(rank, jnp.int32(slots)), pair, chosen)
    part = iota(pl.next_power_of_2(pl.cdiv(tokens, slots)))[None, :]
    _put(table_ref, first[:, None] + part, 0, expert[:, None], part < parts[:, None])
    empty = iota(pl.next_power_of_2(slots))[None, :]
    behind = (empty >= (size - (parts - 1) * slots)[:, None]) & (empty < slots) & (size > 0)[:, None]
    _put(table_ref, (first + parts - 1)[:, None], 1 + empty, -1, behind)
    count_ref[0] = jnp.sum(parts)


def _put(ref, row: Any, column: Any, value: Any, mask: Array) -> None:
    """Store some values of a tile; the interpreter would put old values back in the others' places."""
    row, column, value, mask = over(jnp.where(mask, row, ref.shape[0]), column, value, mask)
    pltriton.store(ref.at[row, column], value, mask=mask)


def _score(logits: Array, score: str) -> Array:
    if score == "sigmoid":
        return jax.nn.sigmoid(logits)
    powers = jnp.exp(logits - jnp.max(logits, axis=1)[:, None])
    return powers / jnp.sum(powers, axis=1)[:, None]


def _items_shapes(most: int, slots: int) -> tuple[Any, Any]:
    return jax.ShapeDtypeStruct((most, 1 + slots), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)


def _call(kernel, results: Any, shape: tuple[int, ...], name: str, interpret: bool):
    tokens, experts = map(pl.next_power_of_2, shape)
    warps = min(max(tokens * experts // 128, 1), 16)
    options = pltriton.CompilerParams(num_warps=warps, num_stages=1)
    return pl.pallas_call(kernel, out_shape=results, grid=(1,), compiler_params=options, interpret=interpret, name=name)
