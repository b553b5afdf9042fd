"""Queries, keys and values out of one product in Pallas-Triton, for NVIDIA GPUs from Ampere on; arguments as in `api`.

A program owns a tile of tokens and some heads, all of them of queries, of keys or of values: it reads their features
once, with the tables of its tokens, and writes them to their place. The backward kernel is the same with source and
destination exchanged and the opposite angles, so that either takes as long as a copy of the product.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

Ref = Any


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Block sizes of a program.

    Attributes:
        rows: tokens of a tile, a power of two.
        heads: heads of a tile, a power of two that divides the numbers of query and of key heads.
        num_warps: warps of a program.
    """

    rows: int
    heads: int
    num_warps: int


def tiles_of(heads: int, key_heads: int, size: int) -> Tiles:
    """Block sizes by the numbers of query and key heads and the head size.

    A tile has 8 KiB of 16-bit features: each of 128 threads has four loads of 16 bytes in flight. With two heads in it
    Triton loads the tables into the registers that need them; otherwise they go through shared memory, which took 12%
    longer on an H200.
    """
    own = min(common(heads, key_heads), 2)
    return Tiles(rows=max(1, power_of_2(4096 // (own * size))), heads=own, num_warps=4)


def common(heads: int, key_heads: int) -> int:
    """The largest power of two that divides both numbers."""
    both = heads | key_heads
    return both & -both


def power_of_2(number: int) -> int:
    """The largest power of two that is at most `number`, 1 for 0."""
    return 1 << max(number, 1).bit_length() - 1


class Static(NamedTuple):
    """The static part of a call.

    Attributes:
        heads: H and K.
        interleaved: whether the pairs of the product are neighbours.
        tiles: block sizes.
        interpret: whether the kernel runs in jax.numpy.
    """

    heads: tuple[int, int]
    interleaved: bool
    tiles: Tiles
    interpret: bool = False

    @property
    def counts(self) -> tuple[int, int, int]:
        """Heads of queries, keys and values."""
        return self.heads[0], self.heads[1], self.heads[1]


# Under jit of their own, so that the layers of an unrolled model lower each kernel once and not once each.
@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6))
def forward(
    qkv: Array,
    tables: tuple[Array, Array] | None,
    scales: Array | None,
    heads: tuple[int, int],
    interleaved: bool,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """Queries, keys and values of one product."""
    batch, length, width = qkv.shape
    tokens, every = batch * length, heads[0] + 2 * heads[1]
    size = width // every
    static = Static(heads, interleaved, tiles or tiles_of(*heads, size), interpret)
    results = tuple(jax.ShapeDtypeStruct((tokens, count, size), qkv.dtype) for count in static.counts)
    arrays = qkv.reshape(tokens, every, size), *_by_token(tables, scales, tokens)
    q, k, v = _call(_forward, "split_rope_forward", static, tokens, arrays, results)
    return tuple(part.reshape(batch, length, *part.shape[1:]) for part in (q, k, v))  # pyright: ignore[reportReturnType]


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6))
def backward(
    gradients: tuple[Array, Array, Array],
    tables: tuple[Array, Array] | None,
    scales: Array | None,
    interleaved: bool,
    with_absmax: bool = False,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> tuple[Array, Array | None]:
    """The gradient of the product from those of queries, keys and values; the largest magnitude for each token."""
    batch, length, count, size = gradients[0].shape
    heads = count, gradients[1].shape[2]
    static = Static(heads, interleaved, tiles or tiles_of(*heads, size), interpret)
    tokens, every = batch * length, sum(static.counts)
    result, absmax = jax.ShapeDtypeStruct((tokens, every, size), gradients[0].dtype), None
    if with_absmax:
        absmax = jax.ShapeDtypeStruct((every // static.tiles.heads, tokens), result.dtype)
    parts = (part.reshape(tokens, *part.shape[2:]) for part in gradients)
    arrays = *parts, *_by_token(tables, scales, tokens)
    gradient, absmax = _call(_backward, "split_rope_backward", static, tokens, arrays, (result, absmax))
    if absmax is not None:
        absmax = jnp.max(absmax, axis=0).astype(jnp.float32).reshape(batch, length)
    return gradient.reshape(batch, length, every * size), absmax


def _by_token(tables: tuple[Array, Array] | None, scales: Array | None, tokens: int) -> tuple[Array | None, ...]:
    cos, sin = (None, None) if tables is None else (table.reshape(tokens, -1) for table in tables)
    return cos, sin, None if scales is None else scales.reshape(tokens)


def _call(kernel, name: str, static: Static, tokens: int, arrays: tuple[Array | None, ...], results: Any) -> Any:
    tiles = static.tiles
    return pl.pallas_call(
        functools.partial(kernel, static=static),
        out_shape=results,
        grid=(pl.cdiv(tokens, tiles.rows) * (sum(static.counts) // tiles.heads),),
        compiler_params=pltriton.CompilerParams(num_warps=tiles.num_warps, num_stages=1),
        interpret=static.interpret,
        name=name,
    )(*arrays)


def _forward(qkv_ref, cos_ref, sin_ref, scale_ref, q_ref, k_ref, v_ref, *, static: Static):
    def move(part: int, part_ref: Ref, rows: Array, head: Array, place: Array):
        read, write = _Tile(qkv_ref, rows, place, static), _Tile(part_ref, rows, head, static)
        scale = _scale(scale_ref, rows, part, qkv_ref)
        half, size = _sizes(cos_ref, part, part_ref)
        if half:
            cos, sin = _angles(cos_ref, sin_ref, rows, half)
            where = _pairs(half, static.interleaved)
            first, second = (read.load(start, step, half) for start, step in where)
            write.store(0, 1, half, _scaled(first * cos - second * sin, scale, qkv_ref.dtype))
            write.store(half, 1, half, _scaled(second * cos + first * sin, scale, qkv_ref.dtype))
        if size > 2 * half:
            rest = read.load(2 * half, 1, size - 2 * half)
            write.store(2 * half, 1, size - 2 * half, _scaled(rest, scale, qkv_ref.dtype))

    _each_part((q_ref, k_ref, v_ref), static, move)


def _backward(dq_ref, dk_ref, dv_ref, cos_ref, sin_ref, scale_ref, dqkv_ref, absmax_ref, *, static: Static):
    def move(part: int, part_ref: Ref, rows: Array, head: Array, place: Array):
        read, write = _Tile(part_ref, rows, head, static), _Tile(dqkv_ref, rows, place, static)
        scale = _scale(scale_ref, rows, part, dqkv_ref)
        half, size = _sizes(cos_ref, part, part_ref)
        written = []
        if half:
            cos, sin = _angles(cos_ref, sin_ref, rows, half)
            halves = (read.load(start, 1, half) for start in (0, half))
            first, second = (_scaled(values, scale, part_ref.dtype) for values in halves)
            turned = (first * cos + second * sin, second * cos - first * sin)
            for (start, step), values in zip(_pairs(half, static.interleaved), turned, strict=True):
                write.store(start, step, half, values)
            written += turned
        if size > 2 * half:
            rest = _scaled(read.load(2 * half, 1, size - 2 * half), scale, part_ref.dtype)
            write.store(2 * half, 1, size - 2 * half, rest)
            written.append(rest)
        if absmax_ref is not None:
            largest = (jnp.max(jnp.max(jnp.abs(values), axis=2), axis=1) for values in written)
            absmax = functools.reduce(jnp.maximum, largest).astype(absmax_ref.dtype)
            mask = rows < absmax_ref.shape[1] if absmax_ref.shape[1] % static.tiles.rows else None
            pltriton.store(absmax_ref.at[lax.div(place, static.tiles.heads), rows], absmax, mask=mask)

    _each_part((dq_ref, dk_ref, dv_ref), static, move)


def _each_part(parts: tuple[Ref, Ref, Ref], static: Static, move) -> None:
    """Call `move` for the part whose heads this program owns, with its tokens and its first head there and in all."""
    tiles, start = static.tiles, 0
    # The heads of a token lie side by side, and so do the programs that read them.
    shares = sum(static.counts) // tiles.heads
    tile, share = lax.div(pl.program_id(0), shares), lax.rem(pl.program_id(0), shares)
    rows, place = tile * tiles.rows + lax.iota(jnp.int32, tiles.rows), share * tiles.heads
    for part, (ref, count) in enumerate(zip(parts, static.counts, strict=True)):
        mine = (place >= start) & (place < start + count)
        pl.when(mine)(functools.partial(move, part, ref, rows, place - start, place))
        start += count


class _Tile(NamedTuple):
    """Some tokens and heads of an array [tokens, heads, features]."""

    ref: Ref
    rows: Array
    head: Array
    static: Static

    def load(self, start: int, step: int, count: int) -> Array:
        """Features start, start + step, … of each head, float32 [rows, heads, count padded to a power of two]."""
        where, mask = self._where(start, step, count)
        other = None if mask is None else jnp.zeros((), self.ref.dtype)
        return pltriton.load(self.ref.at[where], mask=mask, other=other).astype(jnp.float32)

    def store(self, start: int, step: int, count: int, values: Array) -> None:
        """Write them, rounded to the array's dtype."""
        where, mask = self._where(start, step, count)
        pltriton.store(self.ref.at[where], values.astype(self.ref.dtype), mask=mask)

    def _where(self, start: int, step: int, count: int) -> tuple[tuple[Array, Array, Array], Array | None]:
        tiles, width = self.static.tiles, pl.next_power_of_2(count)
        shape, feature = (tiles.rows, tiles.heads, width), lax.iota(jnp.int32, width)
        axes = self.rows[:, None, None], (self.head + lax.iota(jnp.int32, tiles.heads))[None, :, None]
        where = *axes, (start + step * feature)[None, None, :]
        masks = []
        if self.ref.shape[0] % tiles.rows:
            masks.append((self.rows < self.ref.shape[0])[:, None, None])
        if width != count:
            masks.append((feature < count)[None, None, :])
        mask = functools.reduce(jnp.logical_and, masks) if masks else None
        rows, heads, features = (jnp.broadcast_to(axis, shape) for axis in where)
        return (rows, heads, features), None if mask is None else jnp.broadcast_to(mask, shape)


def _sizes(cos_ref: Ref | None, part: int, part_ref: Ref) -> tuple[int, int]:
    """Half of the features of a head that turn, and all of them."""
    return 0 if cos_ref is None or part == 2 else cos_ref.shape[1], part_ref.shape[2]


def _pairs(half: int, interleaved: bool) -> tuple[tuple[int, int], tuple[int, int]]:
    """Where the first and the second features of the pairs begin in the product, and their distance."""
    return ((0, 2), (1, 2)) if interleaved else ((0, 1), (half, 1))


def _angles(cos_ref: Ref, sin_ref: Ref, rows: Array, half: int) -> tuple[Array, Array]:
    """Cosines and sines of the tile's tokens, float32 [rows, 1, half padded to a power of two]."""
    width = pl.next_power_of_2(half)
    feature = lax.iota(jnp.int32, width)
    shape = (rows.shape[0], width)
    where = jnp.broadcast_to(rows[:, None], shape), jnp.broadcast_to(feature[None, :], shape)
    mask = None
    if cos_ref.shape[0] % rows.shape[0] or width != half:
        mask = (where[0] < cos_ref.shape[0]) & (where[1] < half)
    other = None if mask is None else jnp.zeros((), cos_ref.dtype)
    loaded = (pltriton.load(ref.at[where], mask=mask, other=other) for ref in (cos_ref, sin_ref))
    cos, sin = (table.astype(jnp.float32)[:, None, :] for table in loaded)
    return cos, sin


def _scale(scale_ref: Ref | None, rows: Array, part: int, like: Ref) -> Array | None:
    """The queries' scales, rounded to their dtype, float32 [rows, 1, 1]; None for other parts."""
    if scale_ref is None or part != 0:
        return None
    mask = rows < scale_ref.shape[0] if scale_ref.shape[0] % rows.shape[0] else None
    other = None if mask is None else jnp.zeros((), scale_ref.dtype)
    scale = pltriton.load(scale_ref.at[rows], mask=mask, other=other)
    return scale.astype(like.dtype).astype(jnp.float32)[:, None, None]


def _scaled(values: Array, scale: Array | None, dtype: Any) -> Array:
    """The values, or with a scale what it makes of them rounded to the dtype; float32."""
    return values if scale is None else values.astype(dtype).astype(jnp.float32) * scale
