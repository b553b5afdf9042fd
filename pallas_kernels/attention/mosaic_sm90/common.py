"""What the forward and the backward kernels share: tiles, the order they are taken in, bounds and masks."""

import math
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.attention import dropout
from pallas_kernels.attention.mask import Mask
from pallas_kernels.attention.options import Options
from pallas_kernels.attention.ranges import TILE, order_of_all

LOG2E = math.log2(math.e)
MASKED = -1e30
"""A logit that no key gives; far below LOWEST, so that it weighs exactly 0 also where a row has seen nothing yet."""
LOWEST = -1e20
"""What a row's running maximum starts from: finite, so that no infinities are subtracted."""

WARPGROUP_ROWS = 64
SWIZZLED_ROWS = 8
"""The height of a swizzled tile."""
ROWS = plgpu.Layout.WGMMA.reduce(1)
COLUMNS = plgpu.Layout.WGMMA.reduce(0)


def transforms(columns: int, rows: int = 64) -> tuple[Any, ...]:
    """The tiling and swizzle of a 16-bit shared-memory tile: the widest that divides its columns and its rows.

    Its columns are what a product with its transpose sums over, its rows what a product with itself does.
    """
    for swizzle in (128, 64, 32):
        if columns % (swizzle // 2) == 0 and rows % (swizzle // 2) == 0:
            return plgpu.TilingTransform((SWIZZLED_ROWS, swizzle // 2)), plgpu.SwizzleTransform(swizzle)
    raise NotImplementedError(f"a tile of {rows} × {columns} 16-bit elements: expected multiples of 16")


class Rows(NamedTuple):
    """The mask of a kernel's rows (queries, or keys in the transposed kernel): each sees the columns [start, end).

    Attributes:
        start, end: of each row's document, int32 [B, rows padded to tiles] in global memory; None: all columns.
        offset: int32 [1 or B] in global memory: what is added to a query's index to compare it with a key's; not used
            where the options know it.
        length: rows.
        columns: columns.
        options: causality and window.
        transposed: rows are keys and columns queries.
    """

    start: Any
    end: Any
    offset: Any
    length: int
    columns: int
    options: Options
    transposed: bool = False

    @property
    def bounded_below(self) -> bool:
        """Whether a row may not see the first columns, so that the first block of a tile needs a mask."""
        causal_keys = self.transposed and self.options.causal
        return self.start is not None or causal_keys or self.options.sliding_window is not None

    @property
    def bounded_above(self) -> bool:
        """Whether a row may not see the last columns.

        Columns behind the last one are loaded as zeros: as keys they must be masked, as queries they add nothing.
        """
        return self.start is not None or not self.transposed or self.options.sliding_window is not None

    def shift(self, batch: Array) -> Array | int:
        """What is added to a row's index to compare it with a column's."""
        if self.options.query_offset is not None:
            return -self.options.query_offset if self.transposed else self.options.query_offset
        offset = self.offset[batch if self.offset.shape[0] > 1 else 0]
        return -offset if self.transposed else offset

    def _start(self, rows, shift, start):
        """The first column of rows, which may be one number or many; `start` is that of their document."""
        causal, window = self.options.causal, self.options.sliding_window
        if causal and self.transposed:
            start = jnp.maximum(start, rows + shift)
        if window is not None and (not self.transposed or not causal):
            start = jnp.maximum(start, rows + (shift + 1 - window))
        return start

    def _end(self, rows, shift, end):
        """Behind the last column of rows, likewise."""
        causal, window = self.options.causal, self.options.sliding_window
        if causal and not self.transposed:
            end = jnp.minimum(end, rows + (shift + 1))
        if window is not None and (self.transposed or not causal):
            end = jnp.minimum(end, rows + (shift + window))
        return end

    def of_tile(self, batch: Array, first: Array, rows: int) -> tuple[Array, Array, Array, Array]:
        """Bounds of a tile: (least start, greatest start, least end, greatest end); ends never exceed the columns."""
        shift = self.shift(batch)
        last = jnp.minimum(first + (rows - 1), self.length - 1)
        bounds = []
        for row, place in ((first, first), (last, first + (rows - 1))):
            start = jnp.int32(0) if self.start is None else self.start[batch, place]
            end = jnp.int32(self.columns) if self.end is None else self.end[batch, place]
            bounds.append((self._start(row, shift, start), self._end(row, shift, end)))
        (start_low, end_low), (start_high, end_high) = bounds
        return start_low, start_high, jnp.minimum(end_low, self.columns), jnp.minimum(end_high, self.columns)

    def mask(self, logits: Array, batch: Array, first: Array, first_column: Array) -> Array:
        """Logits [WARPGROUP_ROWS, columns] from row `first` on, MASKED where a row does not see the column."""
        first = lax.optimization_barrier(first)  # bounds are made here, not kept in registers around the loop
        rows = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=ROWS) + first
        columns = plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=plgpu.Layout.WGMMA)
        shift, place = self.shift(batch), pl.ds(first, WARPGROUP_ROWS)

        def of_documents(ends, value):
            if ends is None:
                return plgpu.layout_cast(jnp.full((WARPGROUP_ROWS,), value, jnp.int32), ROWS)
            return compat.mosaic_load(ends.at[batch, place], ROWS)

        if self.bounded_below:
            start = self._start(rows, shift, of_documents(self.start, 0)) - first_column
            logits = jnp.where(columns >= broadcast_rows(start, logits.shape), logits, MASKED)
        if self.bounded_above:
            end = self._end(rows, shift, of_documents(self.end, self.columns)) - first_column
            logits = jnp.where(columns < broadcast_rows(end, logits.shape), logits, MASKED)
        return logits


def kept(shape: tuple[int, ...], seed: Any, head: Array, first_row: Array, first_column: Array, options, transposed):
    """Where dropout keeps a weight, [rows, columns]."""

    def word(dimension, first):
        number = plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=plgpu.Layout.WGMMA) + first
        return number.astype(jnp.uint32)

    rows, columns = word(0, first_row), word(1, first_column)
    queries, keys = (columns, rows) if transposed else (rows, columns)
    bits = dropout.random_bits((seed[0], seed[1]), head.astype(jnp.uint32), queries, keys)
    return bits >= jnp.uint32(dropout.threshold(options.dropout_rate))


def rounds(cta: Array, ctas: int, total: int) -> Array:
    """How many of `total` tiles this thread block takes, in `snake` order."""
    whole, rest = divmod(total, ctas)
    if rest == 0:
        return jnp.int32(whole)
    return whole + (_turn(jnp.int32(whole), cta, ctas) < rest).astype(jnp.int32)


def snake(turn: Array, cta: Array, ctas: int) -> Array:
    """The place in the order, heaviest first, of the tile that a block takes in a turn: there and back again."""
    return turn * ctas + _turn(turn, cta, ctas)


def _turn(turn, cta, ctas):
    return jnp.where(lax.rem(turn, jnp.int32(2)) == 0, cta, ctas - 1 - cta)


def broadcast_rows(rows: Array, shape: tuple[int, ...]) -> Array:
    """One number a row, in every column of `shape`."""
    return lax.broadcast_in_dim(rows, shape, [0])


def zeros(shape: tuple[int, ...]) -> Array:
    """An accumulator of 0, float32."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)


def full_rows(value: float) -> Array:
    """One number for each of a warpgroup's rows, float32."""
    return plgpu.layout_cast(jnp.full((WARPGROUP_ROWS,), value, jnp.float32), ROWS)


def padded_rows(ends: Array) -> Array:
    """Range ends [B, rows] with whole tiles of rows; the new rows are as empty as the ranges behind the last one."""
    return jnp.pad(ends, ((0, 0), (0, -ends.shape[1] % TILE)), mode="edge")


def query_tile(place: Array, rows: Rows, order: Any, batch: int, heads: int, tiles: int, block: int):
    """The tile of queries at a place of the order.

    Returns:
        Batch index, first query, head, and the blocks of keys [low, high) that it sees; [inner, outer) whole.
    """
    rank, head = lax.div(place, jnp.int32(heads)), lax.rem(place, jnp.int32(heads))
    if order is not None:
        rank = order[rank]
        row, index = lax.div(rank, jnp.int32(tiles)), lax.rem(rank, jnp.int32(tiles))
    else:  # the last queries see most keys
        row, index = lax.rem(rank, jnp.int32(batch)), tiles - 1 - lax.div(rank, jnp.int32(batch))
    return row, index * TILE, head, *_blocks(rows, row, index * TILE, TILE, block)


def key_tile(place: Array, rows: Rows, order: Any, batch: int, heads: int, tiles: int, size: int, block: int):
    """The tile of `size` keys at a place of the order, with the blocks of queries that see it; as `query_tile`."""
    parts = TILE // size
    place, part = lax.div(place, jnp.int32(parts)), lax.rem(place, jnp.int32(parts))
    rank, head = lax.div(place, jnp.int32(heads)), lax.rem(place, jnp.int32(heads))
    if order is not None:
        rank = order[rank]
        row, index = lax.div(rank, jnp.int32(tiles)), lax.rem(rank, jnp.int32(tiles))
    else:  # most queries see the first keys
        row, index = lax.rem(rank, jnp.int32(batch)), lax.div(rank, jnp.int32(batch))
    first = index * TILE + part * size
    return row, first, head, *_blocks(rows, row, first, size, block)


def _blocks(rows: Rows, batch: Array, first: Array, count: int, block: int) -> tuple[Array, Array, Array, Array]:
    """[low, high) blocks of columns, at least one; every row sees all of those in [inner, outer)."""
    start_low, start_high, end_low, end_high = rows.of_tile(batch, first, count)
    size = jnp.int32(block)
    low = lax.div(jnp.clip(start_low, 0, rows.columns - 1), size)
    high = jnp.maximum(lax.div(jnp.maximum(end_high, 0) + (block - 1), size), low + 1)
    outer = jnp.clip(lax.div(jnp.maximum(end_low, 0), size), low, high) if rows.bounded_above else high
    inner = jnp.clip(lax.div(jnp.maximum(start_high, 0) + (block - 1), size), low, outer)
    return low, inner, outer, high


def broadcast_columns(columns: Array, shape: tuple[int, ...]) -> Array:
    """One number a column, in every row of `shape`."""
    return lax.broadcast_in_dim(columns, shape, [1])


def capped(s: Array, options: Options) -> tuple[Array, float, Array | None]:
    """Logits up to a factor, that factor (what exp2 takes is their product), and the derivative of the cap.

    tanh(x) = 1 − 2 / (exp(2x) + 1): the hardware's own tanh is good to 11 bits only.
    """
    cap = options.logits_soft_cap
    if cap is None:
        return s, options.scale * LOG2E, None
    t = 1.0 - 2.0 / (jnp.exp2(s * (2 * LOG2E * options.scale / cap)) + 1.0)
    return t, cap * LOG2E, 1.0 - t * t


def query_inputs(mask: Mask, options: Options) -> dict[str, Array | None]:
    """What the kernels whose rows are queries read of the mask."""
    ranges = mask.ranges
    return {
        "start": None if ranges is None else padded_rows(ranges.k_start),
        "end": None if ranges is None else padded_rows(ranges.k_end),
        "order": None if ranges is None else order_of_all(ranges.q_order),
        "offset": mask.query_offset if options.query_offset is None else None,
    }


def key_inputs(mask: Mask, options: Options) -> dict[str, Array | None]:
    """What the kernel whose rows are keys reads of the mask."""
    ranges = mask.ranges
    return {
        "start": None if ranges is None else padded_rows(ranges.q_start),
        "end": None if ranges is None else padded_rows(ranges.q_end),
        "order": None if ranges is None else order_of_all(ranges.k_order),
        "offset": mask.query_offset if options.query_offset is None else None,
    }


def launch(
    kernel: Any,
    inputs: dict[str, Array | None],
    outputs: dict[str, jax.ShapeDtypeStruct],
    scratch: dict[str, Any],
    ctas: int,
    name: str,
    interpret: Any,
) -> tuple[Array, ...]:
    """Run `kernel(references by name)` on as many thread blocks of three warpgroups.

    Args:
        kernel: the body.
        inputs: arrays in global memory; None are left out.
        outputs: shapes of the results.
        scratch: shared memory and barriers.
        ctas: thread blocks, at most one a multiprocessor.
        name: of the kernel, in profiles.
        interpret: parameters of Mosaic's interpreter; None compiles.
    """
    given = {key: array for key, array in inputs.items() if array is not None}
    names = (*given, *outputs, *scratch)

    def body(*refs):
        kernel(types.SimpleNamespace(**(dict.fromkeys(inputs) | dict(zip(names, refs, strict=True)))))

    return plgpu.kernel(
        body,
        out_type=tuple(outputs.values()),
        scratch_types=tuple(scratch.values()),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=False
        ),
        kernel_name=name,
        interpret=interpret,
    )(*given.values())


def accumulator(rows: int, columns: int) -> Any:
    """Registers that a product is summed up in, float32."""
    return plgpu.ACC((rows, columns), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]


def accumulator_from(array: Array) -> Any:
    """The same, that starts from an array; for `pl.run_state`, which returns the sum."""
    return plgpu.ACC.init(array)  # pyright: ignore[reportPrivateImportUsage]
