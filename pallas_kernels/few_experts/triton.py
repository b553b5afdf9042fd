"""The passes of `few_experts` in Pallas-Triton; arguments as in `api`.

A program has an item, and some features of its rows. Matrix instructions take 16 rows; those of items of up to four
slots are multiplied element by element.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.few_experts.adapter import Adapter
from pallas_kernels.few_experts.tile import iota, over
from pallas_kernels.few_rows.product import ROWS, product
from pallas_kernels.glu import ACTIVATIONS, clamped_swiglu
from pallas_kernels.tiles import padded_rank, width

_COLUMNS = 128
"""Features of a program; half as many of A where rows are few."""
_AT_ONCE = 8192
"""Elements of a tile that are summed over experts, or over shares, at a time."""


@functools.partial(jax.jit, static_argnames=("pairs", "interpret"))
def rank_products(
    x: Array, adapter: Adapter, table: Array, count: Array, *, pairs: int, interpret: bool = False
) -> Array:
    """Addends of x·Aᵀ of each pair."""
    tokens, features = x.shape
    columns = width(features, _COLUMNS if table.shape[1] > 5 else _COLUMNS // 2)
    shape = jax.ShapeDtypeStruct((features // columns, pairs, adapter.slot), jnp.float32)
    kernel = functools.partial(_rank_products, columns=columns, shared=pairs // tokens)
    grid = features // columns, len(table)
    return _call(kernel, shape, grid, "few_experts_products", interpret)(x, adapter.lora_A, table, count)


def _rank_products(x_ref, a_ref, table_ref, count_ref, addends_ref, *, columns: int, shared: int):
    share, item = pl.program_id(0), _Item.of(table_ref)

    @pl.when(pl.program_id(1) < count_ref[0])
    def _():
        cols = share * columns + iota(columns)
        lora_A = _load_A(a_ref, item.expert, iota(addends_ref.shape[2]), cols)
        x = item.load(x_ref, cols, shared=shared)
        item.store(addends_ref, iota(addends_ref.shape[2]), product(x, lora_A.astype(x.dtype)), share)


@functools.partial(jax.jit, static_argnames=("activation", "clamp", "interpret"))
def gate(
    base: Array,
    products: Array | None,
    inner: Adapter | None,
    bias: Array | None,
    outer: Adapter | None,
    table: Array,
    count: Array,
    *,
    activation: str,
    clamp: tuple[float, float] | None,
    interpret: bool = False,
) -> tuple[Array, Array | None]:
    """The gated product of each pair, and addends of its rank products."""
    pairs, features = base.shape[0], base.shape[1] // 2
    columns, addends = width(features, _COLUMNS), None
    if outer is not None:
        addends = jax.ShapeDtypeStruct((features // columns, pairs, outer.slot), jnp.float32)
    scaling = 0.0 if inner is None else inner.scaling
    kernel = functools.partial(_gate, columns=columns, scaling=scaling, activation=activation, clamp=clamp)
    shapes = jax.ShapeDtypeStruct((pairs, features), base.dtype), addends
    lora_B, lora_A = None if inner is None else inner.lora_B, None if outer is None else outer.lora_A
    grid = features // columns, len(table)
    return _call(kernel, shapes, grid, "few_experts_gate", interpret)(
        base, products, lora_B, bias, lora_A, table, count
    )


def _gate(
    base_ref,
    products_ref,
    b_ref,
    bias_ref,
    a_ref,
    table_ref,
    count_ref,
    h_ref,
    addends_ref,
    *,
    columns: int,
    scaling: float,
    activation: str,
    clamp: tuple[float, float] | None,
):
    share, item, features, dtype = pl.program_id(0), _Item.of(table_ref), h_ref.shape[1], h_ref.dtype

    @pl.when(pl.program_id(1) < count_ref[0])
    def _():
        cols = share * columns + iota(columns)
        places = cols, features + cols
        ranks = None if products_ref is None else iota(products_ref.shape[2])
        matrices = [None if ranks is None else _load_B(b_ref, item.expert, place, ranks) for place in places]
        lora_A = None if addends_ref is None else _load_A(a_ref, item.expert, iota(addends_ref.shape[2]), cols)
        halves = [item.load(base_ref, place).astype(jnp.float32) for place in places]
        products = None if ranks is None else item.sum(products_ref, ranks).astype(dtype)
        for half, (place, lora_B) in enumerate(zip(places, matrices, strict=True)):
            if products is not None and lora_B is not None:
                halves[half] += product(products, (lora_B.astype(jnp.float32) * scaling).astype(dtype))
            if bias_ref is not None:
                expert = jnp.full(place.shape, item.expert, jnp.int32)
                halves[half] += pltriton.load(bias_ref.at[expert, place]).astype(jnp.float32)[None, :]
        if clamp:
            h = clamped_swiglu(*halves, limit=clamp[0], alpha=clamp[1])
        else:
            h = ACTIVATIONS[activation](halves[0]) * halves[1]
        h = h.astype(dtype)
        item.store(h_ref, cols, h)
        if addends_ref is not None and lora_A is not None:
            item.store(addends_ref, iota(addends_ref.shape[2]), product(h, lora_A.astype(dtype)), share)


@functools.partial(jax.jit, static_argnames=("interpret",))
def combine(
    base: Array,
    products: Array | None,
    adapter: Adapter | None,
    bias: Array | None,
    weights: Array,
    experts: Array,
    *,
    interpret: bool = False,
) -> Array:
    """The weighted sums of each token's pairs."""
    (tokens, chosen), features = experts.shape, base.shape[1]
    slot, lora_B, scaling = 1, None, 0.0
    if adapter is not None:
        slot, lora_B, scaling = adapter.slot, adapter.lora_B, adapter.scaling
    most = _AT_ONCE if tokens > 4 else _AT_ONCE // 4
    columns = width(features, min(max(most // (slot * pl.next_power_of_2(chosen)), 8), 64))
    kernel = functools.partial(_combine, columns=columns, scaling=scaling)
    shape = jax.ShapeDtypeStruct((tokens, features), base.dtype)
    return _call(kernel, shape, (features // columns, tokens), "few_experts_combine", interpret)(
        base, products, lora_B, bias, weights, experts
    )


def _combine(base_ref, products_ref, b_ref, bias_ref, weights_ref, experts_ref, out_ref, *, columns: int, scaling):
    token, count, dtype = pl.program_id(1), experts_ref.shape[1], out_ref.dtype
    choice, cols = iota(pl.next_power_of_2(count)), pl.program_id(0) * columns + iota(columns)
    here, tokens = choice < count, jnp.full(choice.shape, token, jnp.int32)
    expert = pltriton.load(experts_ref.at[tokens, choice], mask=here, other=0)
    weight = pltriton.load(weights_ref.at[tokens, choice], mask=here, other=jnp.zeros((), weights_ref.dtype))
    pairs = token * count + choice
    *index, mask = over(pairs[:, None], cols[None, :], here[:, None])
    total = pltriton.load(base_ref.at[tuple(index)], mask=mask, other=jnp.zeros((), base_ref.dtype)).astype(jnp.float32)
    if products_ref is not None:
        ranks = iota(products_ref.shape[2])
        lora_B = (_load_B(b_ref, expert[:, None, None], cols, ranks).astype(jnp.float32) * scaling).astype(dtype)
        products = _sum(products_ref, pairs, here, ranks).astype(dtype).astype(jnp.float32)
        total += jnp.sum(lora_B.astype(jnp.float32) * products[:, None, :], axis=2)
    if bias_ref is not None:
        total += pltriton.load(bias_ref.at[over(expert[:, None], cols[None, :])]).astype(jnp.float32)
    out = jnp.sum(total * weight.astype(jnp.float32)[:, None], axis=0)
    pltriton.store(out_ref.at[jnp.full(cols.shape, token, jnp.int32), cols], out.astype(dtype))


class _Item(NamedTuple):
    """A program's item.

    Attributes:
        expert: its number.
        pairs: its rows, some not there; a tile.
        here: which of them are.
    """

    expert: Array
    pairs: Array
    here: Array

    @classmethod
    def of(cls, table_ref) -> "_Item":
        number, slots = pl.program_id(1), table_ref.shape[1] - 1
        tile = next(size for size in (1, 2, 4, ROWS) if slots <= size)
        place = iota(tile)
        index = jnp.full(place.shape, number, jnp.int32), 1 + place
        pairs = pltriton.load(table_ref.at[index], mask=place < slots, other=-1)
        return cls(table_ref[number, 0], pairs, pairs >= 0)

    def _index(self, ref, cols: Array, leading: Any = None, shared: int = 1) -> tuple[tuple[Array, ...], Array]:
        rows = self.pairs if shared == 1 else jax.lax.div(self.pairs, jnp.int32(shared))
        rows = jnp.where(self.here, rows, ref.shape[-2])
        *index, mask = over(*(() if leading is None else (leading,)), rows[:, None], cols[None, :], self.here[:, None])
        return tuple(index), mask

    def load(self, ref, cols: Array, *, shared: int = 1) -> Array:
        """Some columns of its rows, of which `shared` are one row of the reference; 0 for those that are not there."""
        index, mask = self._index(ref, cols, None, shared)
        return pltriton.load(ref.at[index], mask=mask, other=jnp.zeros((), ref.dtype))

    def store(self, ref, cols: Array, values: Array, leading: Any = None) -> None:
        index, mask = self._index(ref, cols, leading)
        pltriton.store(ref.at[index], values.astype(ref.dtype), mask=mask)

    def sum(self, ref, cols: Array) -> Array:
        """The sum of its rows' addends."""
        return _sum(ref, self.pairs, self.here, cols)


def _call(kernel, results: Any, grid: tuple[int, ...], name: str, interpret: bool):
    return pl.pallas_call(
        kernel,
        out_shape=results,
        grid=grid,
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name=name,
    )


def _sum(ref, rows: Array, here: Array, cols: Array) -> Array:
    """The sum of addends, as one tile, over its first axis at the end."""
    count, shape = ref.shape[0], rows.shape + cols.shape
    at_once = min(pl.next_power_of_2(count), max(_AT_ONCE // (shape[0] * shape[1]), 2))
    total = jnp.zeros((at_once, *shape), jnp.float32)
    for start in range(0, count, at_once):
        number = (start + iota(at_once))[:, None, None]
        *index, mask = over(number, rows[None, :, None], cols[None, None, :], (number < count) & here[None, :, None])
        total += pltriton.load(ref.at[tuple(index)], mask=mask, other=jnp.zeros((), ref.dtype))
    return jnp.sum(total, axis=0)


def _load_A(ref, expert: Array, ranks: Array, cols: Array) -> Array:
    """Some columns of an expert's A, 0 behind the rank."""
    return _inside(ref, over(expert, ranks[:, None], cols[None, :]), 1)


def _load_B(ref, expert: Array, rows: Array, ranks: Array) -> Array:
    """Some rows of an expert's B, or of each of several experts', 0 behind the rank."""
    return _inside(ref, over(expert, rows[:, None], ranks[None, :]), 2)


def _inside(ref, index: tuple[Array, ...], axis: int) -> Array:
    rank, mask = ref.shape[axis], None
    if rank != padded_rank(rank):
        mask = index[axis] < rank
    return pltriton.load(ref.at[index], mask=mask, other=None if mask is None else jnp.zeros((), ref.dtype))
