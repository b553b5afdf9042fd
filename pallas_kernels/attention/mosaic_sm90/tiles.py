"""Tiles of rows (queries, or keys in the transposed kernel): the order they are taken in, bounds, masks."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.attention.mosaic_sm90.common import MASKED, ROWS, WARPGROUP_ROWS, broadcast_rows
from pallas_kernels.attention.options import Options
from pallas_kernels.attention.ranges import TILE


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

    def mask(self, logits: Array, batch: Array, first: Array, first_column: Array, bounds: Any) -> Array:
        """Logits MASKED where a row does not see the column.

        Args:
            logits: [WARPGROUP_ROWS, columns].
            batch: index in the batch.
            first: the first row.
            first_column: the first column.
            bounds: start and end of the rows' documents in shared memory, int32 [2, WARPGROUP_ROWS]; None without.
        """
        first = lax.optimization_barrier(first)  # bounds are made here, not kept in registers around the loop
        rows = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=ROWS) + first
        columns = plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=plgpu.Layout.WGMMA)
        shift = self.shift(batch)

        def of_documents(index, value):
            if bounds is None:
                return plgpu.layout_cast(jnp.full((WARPGROUP_ROWS,), value, jnp.int32), ROWS)
            return compat.mosaic_load(bounds.at[index], ROWS)

        if self.bounded_below:
            start = self._start(rows, shift, of_documents(0, 0)) - first_column
            logits = jnp.where(columns >= broadcast_rows(start, logits.shape), logits, MASKED)
        if self.bounded_above:
            end = self._end(rows, shift, of_documents(1, self.columns)) - first_column
            logits = jnp.where(columns < broadcast_rows(end, logits.shape), logits, MASKED)
        return logits


class Tile(NamedTuple):
    """A tile and the blocks of columns that its rows see.

    Attributes:
        row: index in the batch.
        first: its first row.
        head: of the queries, or of the keys in the transposed kernel.
        low, high: the blocks [low, high), at least one.
        inner, outer: of these, every row sees all of [inner, outer).
    """

    row: Array
    first: Array
    head: Array
    low: Array
    inner: Array
    outer: Array
    high: Array


class Work(NamedTuple):
    """A warpgroup's part of a tile: as `Tile`, and the blocks that are loaded for the rest of the tile alone.

    Attributes:
        before: how many of those lie below `low`.
        behind: how many at `high` and behind.
    """

    row: Array
    first: Array
    head: Array
    low: Array
    inner: Array
    outer: Array
    high: Array
    before: Array | int = 0
    behind: Array | int = 0


def tile_at(
    place: Array, rows: Rows, order: Any, batch: int, heads: int, tiles: int, *, block: int, size: int, members: int = 1
) -> Tile:
    """The tile at a place of the order, heaviest first.

    Args:
        place: from 0 to batch · tiles · (TILE / size) · (heads / members).
        rows: the kernel's rows.
        order: the tiles of `TILE` rows of all batch elements in their order, or None where causality alone makes them.
        batch: rows of the batch.
        heads: of the queries, or of the keys in the transposed kernel.
        tiles: of `TILE` rows in a row of the batch.
        block: columns multiplied at once.
        size: rows of a tile: TILE or WARPGROUP_ROWS.
        members: heads of a tile.
    """
    parts, groups = TILE // size, heads // members
    place, part = lax.div(place, jnp.int32(parts)), lax.rem(place, jnp.int32(parts))
    rank, group = lax.div(place, jnp.int32(groups)), lax.rem(place, jnp.int32(groups))
    if order is not None:
        rank = order[rank]
        row, index = lax.div(rank, jnp.int32(tiles)), lax.rem(rank, jnp.int32(tiles))
    else:  # the last queries see most keys, and most queries see the first keys
        row, index = lax.rem(rank, jnp.int32(batch)), lax.div(rank, jnp.int32(batch))
        index = index if rows.transposed else tiles - 1 - index
    first = index * TILE + part * size
    return Tile(row, first, group * members, *_blocks(rows, row, first, size, block))


def work(tile: Tile, rows: Rows, part: Array | int, block: int, *, members: int = 1, whole: bool = False) -> Work:
    """What warpgroup `part` does of a tile.

    Args:
        tile: the tile.
        rows: the kernel's rows.
        part: 0 or 1.
        block: columns multiplied at once.
        members: heads of the tile; of 2 each warpgroup takes one, else 64 of its rows each.
        whole: whether to take all of the tile's blocks, not only those that these rows see.
    """
    if members == 2:
        return Work(*tile._replace(head=tile.head + part))
    first = tile.first + part * WARPGROUP_ROWS
    if whole:
        return Work(*tile._replace(first=first))
    low, inner, outer, high = _blocks(rows, tile.row, first, WARPGROUP_ROWS, block)
    low = jnp.clip(low, tile.low, tile.high - 1)
    high = jnp.clip(high, low + 1, tile.high)
    outer = jnp.clip(outer, low, high)
    inner = jnp.clip(inner, low, outer)
    return Work(tile.row, first, tile.head, low, inner, outer, high, low - tile.low, tile.high - high)


NUMBERS = len(Work._fields)


class Mail(NamedTuple):
    """Where the loading warpgroup writes down for documents what the others need, in shared memory.

    They would else wait for global memory at the start of each tile.

    Attributes:
        work: int32 [slots, parts, NUMBERS].
        bounds: int32 [slots, parts, 2, WARPGROUP_ROWS]: where the rows' documents start and end.
        starts, ends: the same in global memory, [B, rows padded to tiles].
    """

    work: Any
    bounds: Any
    starts: Any
    ends: Any

    ARRIVALS = 3
    """What a barrier must count for each post."""

    @staticmethod
    def scratch(slots: int, parts: int) -> dict[str, Any]:
        """The shared memory of `work` and `bounds`."""
        return {
            "work": plgpu.SMEM((slots, parts, NUMBERS), jnp.int32),
            "bounds": plgpu.SMEM((slots, parts, 2, WARPGROUP_ROWS), jnp.int32),
        }

    def post(self, slot: Array, part: int, work: Work, full: Any) -> None:
        """Write what a warpgroup is to do; it may read when the barrier `full` is."""
        for index, number in enumerate(work):
            self.work[slot, part, index] = jnp.asarray(number, jnp.int32)
        plgpu.barrier_arrive(full)
        for index, array in enumerate((self.starts, self.ends)):
            place = (work.row, pl.ds(work.first, WARPGROUP_ROWS))
            plgpu.copy_gmem_to_smem(array.at[place], self.bounds.at[slot, part, index], full)

    def read(self, slot: Array, part: Array | int) -> Work:
        """What `post` wrote."""
        return Work(*(self.work[slot, part, index] for index in range(NUMBERS)))


def leave(blocks: Array | int, taken: Array, stages: Array, rings: Sequence[tuple[Any, Any]]) -> Array:
    """Give back, unread, the next `blocks` blocks of rings of shared memory.

    A block is waited for all the same: else a warpgroup could give the same place back twice while the other has not
    given it back once.

    Args:
        blocks: how many.
        taken: blocks taken so far.
        stages: of the rings.
        rings: barriers (full, free) of each.

    Returns:
        Blocks taken now.
    """
    if isinstance(blocks, int) and blocks == 0:
        return taken

    def one(_, taken):
        slot = lax.rem(taken, stages)
        for full, free in rings:
            plgpu.barrier_wait(full.at[slot])
            plgpu.barrier_arrive(free.at[slot])
        return taken + 1

    return lax.fori_loop(0, blocks, one, taken)


def _blocks(rows: Rows, batch: Array, first: Array, count: int, block: int) -> tuple[Array, Array, Array, Array]:
    """[low, high) blocks of columns, at least one; every row sees all of those in [inner, outer)."""
    start_low, start_high, end_low, end_high = rows.of_tile(batch, first, count)
    size = jnp.int32(block)
    low = lax.div(jnp.clip(start_low, 0, rows.columns - 1), size)
    high = jnp.maximum(lax.div(jnp.maximum(end_high, 0) + (block - 1), size), low + 1)
    outer = jnp.clip(lax.div(jnp.maximum(end_low, 0), size), low, high) if rows.bounded_above else high
    inner = jnp.clip(lax.div(jnp.maximum(start_high, 0) + (block - 1), size), low, outer)
    return low, inner, outer, high


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


def each(turns: Array, buffers: int, body: Callable[[Array, Array], Array]) -> None:
    """Take a thread block's tiles in turn: `body(turn, blocks taken so far)` returns the blocks taken now.

    Args:
        turns: how many tiles.
        buffers: tiles in shared memory; with 1 a thread block takes one tile alone.
        body: for one tile.
    """
    if buffers == 1:
        body(jnp.int32(0), jnp.int32(0))
    else:
        lax.fori_loop(0, turns, body, jnp.int32(0))
