"""The passes of `few_rows` in Pallas-Triton; arguments as in `api`.

A program has one tile of up to 16 rows and some features. Tiles of fewer than 16 rows are multiplied with A and B
element by element, exact in float32; matrix instructions take 16, and serve fewer rows of many ranks.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jax.typing import DTypeLike

from pallas_kernels.few_rows.adapters import Adapters
from pallas_kernels.few_rows.product import ROWS, product
from pallas_kernels.glu.reference import ACTIVATIONS
from pallas_kernels.tiles import width

_A_COLUMNS, _B_COLUMNS, _GATE_COLUMNS = 64, 64, 128
"""Features of a program that multiplies with A, with B, and of a gated block. Of more rows twice as many but for B."""
_AT_ONCE = 4096
"""Elements of a tile that are read at a time."""
_APART = 64
"""Ranks from which each A has programs of its own: three of 128 are more than the registers hold."""
_BY_ELEMENT = 128
"""Rows times ranks from which matrix instructions are faster; 512 by element also take half a minute to compile."""


# Under jit of their own, so that the layers of an unrolled model lower each kernel once and not once each.
@functools.partial(jax.jit, static_argnames=("eps", "offset", "interpret"))
def normed_products(
    x: Array,
    weight: Array | None,
    adapters: Adapters,
    *,
    eps: float,
    offset: float,
    interpret: bool = False,
) -> tuple[Array | None, Array]:
    """The normalised rows, None without a weight, and addends of the rank products."""
    (rows, features), described = x.shape, _Described.of(adapters)
    columns = width(features, _A_COLUMNS * (1 if rows < ROWS // 2 else 2))
    numbers = range(len(described.parts))
    groups = [[number] for number in numbers] if described.slot >= _APART else [[*numbers]]
    return _call(
        functools.partial(_normed_products, eps=eps, offset=offset, columns=columns, adapters=described, groups=groups),
        (
            None if weight is None else jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((features // columns, rows, len(described.parts) * described.kept), jnp.float32),
        ),
        (features // columns * len(groups), rows),
        "few_rows_products" if weight is None else "few_rows_norm",
        interpret,
    )(x, weight, adapters.lora_A, adapters.chosen)


def _normed_products(
    x_ref,
    weight_ref,
    a_refs,
    chosen_ref,
    normed_ref,
    addends_ref,
    *,
    eps: float,
    offset: float,
    columns: int,
    adapters: "_Described",
    groups: list[list[int]],
):
    program, count, features = pl.program_id(0), len(groups), x_ref.shape[1]
    rows = _rows_of(x_ref.shape[0], adapters)
    share, own = jax.lax.div(program, count), jax.lax.rem(program, count)
    cols = share * columns + jax.lax.iota(jnp.int32, columns)
    early = len(rows) < ROWS and count == 1  # else the registers are full
    matrices = [_load_A(a_ref, cols, adapters.slot) for a_ref in a_refs] if early else None
    x = _load(x_ref, rows, cols)
    if weight_ref is not None:
        scale = pltriton.load(weight_ref.at[cols]).astype(jnp.float32) + offset
        at_once = width(features, max(_AT_ONCE // len(rows), 128))
        squares = jnp.zeros((len(rows), at_once), jnp.float32)
        for start in range(0, features, at_once):
            tile = _load(x_ref, rows, start + jax.lax.iota(jnp.int32, at_once)).astype(jnp.float32)
            squares += tile * tile
        normed = x.astype(jnp.float32) * jax.lax.rsqrt(jnp.sum(squares, axis=1) / features + eps)[:, None]
        if offset == 0.0:
            normed = normed.astype(x.dtype).astype(jnp.float32)
        x = (normed * scale[None, :]).astype(x.dtype)
        pl.when(own == 0)(lambda: _store(normed_ref, rows, cols, x))

    def of_group(number: int, _: int) -> None:
        loaded = matrices or [_load_A(a_refs[part], cols, adapters.slot) for part in groups[number]]
        for part, lora_A in zip(groups[number], loaded, strict=True):
            _store_products((addends_ref, chosen_ref), adapters, part, share, rows, x, lora_A)

    _of_part((1,) * count, own, of_group)


@functools.partial(jax.jit, static_argnames=("dtype", "interpret"))
def add(
    base: Array,
    products: Array | None,
    adapters: Adapters,
    residual: Array | None,
    *,
    dtype: DTypeLike,
    interpret=False,
) -> Array:
    """The sum of all addends, with B."""
    rows, features = base.shape[1:]
    columns = functools.reduce(lambda most, part: width(part, most), adapters.parts, _B_COLUMNS)
    return _call(
        functools.partial(_add, adapters=_Described.of(adapters), columns=columns),
        jax.ShapeDtypeStruct((rows, features), dtype),
        (features // columns, rows),
        "few_rows_add",
        interpret,
    )(base, products, adapters.lora_B, adapters.chosen, residual)


def _add(base_ref, products_ref, b_refs, chosen_ref, residual_ref, out_ref, *, adapters: "_Described", columns: int):
    rows, first = _rows_of(base_ref.shape[1], adapters), pl.program_id(0) * columns
    cols, thin = first + jax.lax.iota(jnp.int32, columns), (products_ref, chosen_ref)

    def part(number: int, start: int):
        lora_B, total = _load_B(b_refs[number], cols - start, adapters.slot), _sum(base_ref, rows, cols)
        if residual_ref is not None:
            total += _load(residual_ref, rows, cols).astype(jnp.float32)
        products = None if lora_B is None else _products(thin, adapters, number, rows, out_ref.dtype)
        _store(out_ref, rows, cols, total + _through(products, lora_B, adapters, number, out_ref.dtype))

    _of_part(adapters.parts, first, part)


@functools.partial(jax.jit, static_argnames=("counts", "dtype", "interpret"))
def heads(
    base: Array,
    products: Array,
    adapters: Adapters,
    cos: Array,
    sin: Array,
    *,
    counts: tuple[int, int],
    dtype: DTypeLike,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """Queries and keys, turned, and values."""
    rows, size = base.shape[1], 2 * cos.shape[1]
    every = counts[0], counts[1], counts[1]
    return _call(
        functools.partial(_heads, adapters=_Described.of(adapters), every=every, size=size),
        tuple(jax.ShapeDtypeStruct((rows, count * size), dtype) for count in every),
        (sum(every), rows),
        "few_rows_heads",
        interpret,
    )(base, products, adapters.lora_B, adapters.chosen, cos, sin)


def _heads(
    base_ref,
    products_ref,
    b_refs,
    chosen_ref,
    cos_ref,
    sin_ref,
    *out_refs,
    adapters: "_Described",
    every: tuple[int, ...],
    size: int,
):
    rows, head, feature = _rows_of(base_ref.shape[1], adapters), pl.program_id(0), jax.lax.iota(jnp.int32, size // 2)

    def part(which: int, start: int):
        out_ref, number = out_refs[which], which if len(adapters.parts) > 1 else 0
        behind = start * size if len(adapters.parts) > 1 else 0
        places = [head * size + half + feature for half in (0, size // 2)]
        matrices = [_load_B(b_refs[number], place - behind, adapters.slot) for place in places]
        bases = [_sum(base_ref, rows, place) for place in places]
        if which < 2:
            cos, sin = (_load(ref, rows, feature).astype(jnp.float32) for ref in (cos_ref, sin_ref))
        products = _products((products_ref, chosen_ref), adapters, number, rows, out_ref.dtype)
        first, second = (
            base + _through(products, lora_B, adapters, number, out_ref.dtype)
            for base, lora_B in zip(bases, matrices, strict=True)
        )
        if which < 2:
            first, second = first * cos - second * sin, second * cos + first * sin
        own = (head - start) * size + feature
        _store(out_ref, rows, own, first)
        _store(out_ref, rows, own + size // 2, second)

    _of_part(every, head, part)


@functools.partial(jax.jit, static_argnames=("activation", "dtype", "interpret"))
def gate(
    base: Array,
    products: Array | None,
    adapters: Adapters,
    down: Adapters,
    *,
    activation: str,
    dtype: DTypeLike,
    interpret: bool = False,
) -> tuple[Array, Array | None]:
    """The gated product, and addends of its rank products."""
    rows, features = base.shape[1], base.shape[2] // 2
    columns, addends = width(features, _GATE_COLUMNS * (1 if rows < ROWS // 2 else 2)), None
    if down.rank:
        addends = jax.ShapeDtypeStruct((features // columns, rows, down.kept), jnp.float32)
    described, behind = _Described.of(adapters), _Described.of(down)
    kernel = functools.partial(_gate, adapters=described, down=behind, activation=activation, columns=columns)
    h = jax.ShapeDtypeStruct((rows, features), dtype)
    return _call(kernel, (h, addends), (features // columns, rows), "few_rows_gate", interpret)(
        base, products, adapters.lora_B, adapters.chosen, down.lora_A[0], down.chosen
    )


def _gate(
    base_ref,
    products_ref,
    b_refs,
    chosen_ref,
    a_ref,
    down_chosen_ref,
    h_ref,
    addends_ref,
    *,
    adapters: "_Described",
    down: "_Described",
    activation: str,
    columns: int,
):
    share, rows, features = pl.program_id(0), _rows_of(base_ref.shape[1], adapters, down), base_ref.shape[2] // 2
    cols, apart = share * columns + jax.lax.iota(jnp.int32, columns), len(adapters.parts) > 1
    matrices = [_load_B(b_refs[half * apart], cols + (not apart) * half * features, adapters.slot) for half in range(2)]
    lora_A = _load_A(a_ref, cols, down.slot)
    bases = [_sum(base_ref, rows, half * features + cols) for half in range(2)]
    products = [_products((products_ref, chosen_ref), adapters, part, rows, h_ref.dtype) for part in range(1 + apart)]
    gate, up = (
        bases[half] + _through(products[half * apart], matrices[half], adapters, half * apart, h_ref.dtype)
        for half in range(2)
    )
    h = (ACTIVATIONS[activation](gate) * up).astype(h_ref.dtype)
    _store(h_ref, rows, cols, h)
    if addends_ref is not None:
        _store_products((addends_ref, down_chosen_ref), down, 0, share, rows, h, lora_A)


class _Described(NamedTuple):
    """Adapters without their arrays, for kernels."""

    parts: tuple[int, ...]
    scalings: tuple[float, ...]
    slot: int
    kept: int

    @classmethod
    def of(cls, adapters: Adapters) -> "_Described":
        return cls(adapters.parts, adapters.scalings, adapters.slot, adapters.kept)


def _call(kernel, results: Any, grid: tuple[int, int], name: str, interpret: bool):
    programs, rows = grid
    return pl.pallas_call(
        kernel,
        out_shape=results,
        grid=(programs, pl.cdiv(rows, ROWS)),
        compiler_params=pltriton.CompilerParams(num_warps=4 if rows < ROWS // 2 else 8, num_stages=1),
        interpret=interpret,
        name=name,
    )


def _rows_of(count: int, *adapters: _Described) -> Array:
    """The program's rows of `count`, some behind the last, to multiply with these adapters."""
    ranks = max(own.slot for own in adapters)
    tile = next(size for size in (1, 2, 4, ROWS) if size == ROWS or (count <= size and size * ranks < _BY_ELEMENT))
    return pl.program_id(1) * ROWS + jax.lax.iota(jnp.int32, tile)


def _where(ref, rows: Array, cols: Array, leading: Any = None) -> tuple[tuple[Array, ...], Array | None]:
    """Indices of a tile of a reference, and a mask of those that are inside.

    Args:
        ref: [N, F], or [C, N, F].
        rows: of the tile.
        cols: of the tile.
        leading: the first index of three.
    """
    shape, count = rows.shape + cols.shape, ref.shape[-2]
    index = jnp.broadcast_to(rows[:, None], shape), jnp.broadcast_to(cols[None, :], shape)
    mask = None if len(rows) == count < ROWS else index[0] < count
    return index if leading is None else (jnp.full(shape, leading, jnp.int32), *index), mask


def _load(ref, rows: Array, cols: Array, leading: Any = None) -> Array:
    """A tile, 0 behind the last row."""
    index, mask = _where(ref, rows, cols, leading)
    return pltriton.load(ref.at[index], mask=mask, other=None if mask is None else jnp.zeros((), ref.dtype))


def _store(ref, rows: Array, cols: Array, values: Array, leading: Any = None) -> None:
    index, mask = _where(ref, rows, cols, leading)
    pltriton.store(ref.at[index], values.astype(ref.dtype), mask=mask)


def _sum(ref, rows: Array, cols: Array) -> Array:
    """The sum of addends, float32 [rows, columns]: many at a time as one tile, over its first axis at the end."""
    count, shape = ref.shape[0], (len(rows), len(cols))
    if count == 1:
        return _load(ref, rows, cols, 0).astype(jnp.float32)
    at_once = min(pl.next_power_of_2(count), max(_AT_ONCE // (shape[0] * shape[1]), 2))
    total, whole = jnp.zeros((at_once, *shape), jnp.float32), (at_once, *shape)
    for start in range(0, count, at_once):
        number = jnp.broadcast_to((start + jax.lax.iota(jnp.int32, at_once))[:, None, None], whole)
        row, column = jnp.broadcast_to(rows[None, :, None], whole), jnp.broadcast_to(cols[None, None, :], whole)
        mask = (number < count) & (row < ref.shape[1])
        tile = pltriton.load(ref.at[number, row, column], mask=mask, other=jnp.zeros((), ref.dtype))
        total += tile.astype(jnp.float32)
    return jnp.sum(total, axis=0)


def _load_A(a_ref, cols: Array, slot: int) -> Array | None:
    """Some columns of A. Kernels begin with their loads: a sum over a program is a barrier for those behind it."""
    return None if a_ref is None else _thin(a_ref, jax.lax.iota(jnp.int32, slot), cols, 0)


def _load_B(b_ref, rows: Array, slot: int) -> Array | None:
    """Some rows of B."""
    return None if b_ref is None else _thin(b_ref, rows, jax.lax.iota(jnp.int32, slot), 1)


def _products(thin: tuple[Any, Any], adapters: _Described, part: int, rows: Array, dtype) -> Array | None:
    """A part's rank products, rounded to the dtype of the computation.

    Args:
        thin: references of the addends of the products, and of those that each row has; either may be None.
        adapters: of the projection.
        part: its number.
        rows: of the products.
        dtype: of the computation.
    """
    products_ref, chosen_ref = thin
    if products_ref is None:
        return None
    products = _sum(products_ref, rows, part * adapters.kept + jax.lax.iota(jnp.int32, adapters.kept))
    if adapters.kept < adapters.slot:
        copies = len(rows), adapters.slot // adapters.kept, adapters.kept
        products = jnp.broadcast_to(products[:, None, :], copies).reshape(len(rows), adapters.slot)
    return _chosen(chosen_ref, rows, products).astype(dtype)


def _chosen(chosen_ref, rows: Array, products: Array) -> Array:
    """Rank products, 0 where a row does not have them."""
    if chosen_ref is None:
        return products
    return jnp.where(_load(chosen_ref, rows, jax.lax.iota(jnp.int32, products.shape[1])) != 0, products, 0.0)


def _through(products: Array | None, lora_B: Array | None, adapters: _Described, part: int, dtype) -> Array | float:
    """A part's rank products times its s·B, which is rounded to the dtype of the computation, float32."""
    if products is None or lora_B is None:
        return 0.0
    return product(products, (lora_B.astype(jnp.float32) * adapters.scalings[part]).astype(dtype))


def _store_products(
    thin: tuple[Any, Any], adapters: _Described, part: int, share, rows: Array, x: Array, lora_A: Array | None
) -> None:
    """Store x·Aᵀ over some columns as a part's rank products; arguments as in `_products`."""
    (addends_ref, chosen_ref), shape = thin, (len(rows), adapters.slot // adapters.kept, adapters.kept)
    if lora_A is None:
        products = jnp.zeros((len(rows), adapters.kept), jnp.float32)
    else:
        products = product(x, lora_A.astype(x.dtype))
        if adapters.kept < adapters.slot:
            products = jnp.sum(_chosen(chosen_ref, rows, products).reshape(shape), axis=1)
    _store(addends_ref, rows, part * adapters.kept + jax.lax.iota(jnp.int32, adapters.kept), products, share)


def _thin(ref, first: Array, second: Array, axis: int) -> Array:
    """A tile of A or B, 0 behind the rank, which lies along an axis."""
    shape = first.shape + second.shape
    index = jnp.broadcast_to(first[:, None], shape), jnp.broadcast_to(second[None, :], shape)
    rank = ref.shape[axis]
    if rank == shape[axis]:
        return pltriton.load(ref.at[index])
    return pltriton.load(ref.at[index], mask=index[axis] < rank, other=jnp.zeros((), ref.dtype))


def _of_part(counts: tuple[int, ...], place: Any, call: Callable[[int, int], None]) -> None:
    """Call for the part that has a place, with its number and the first place of it."""
    start = 0
    for number, count in enumerate(counts):
        here = (place >= start) & (place < start + count)
        pl.when(here)(functools.partial(call, number, start)) if len(counts) > 1 else call(number, start)
        start += count
