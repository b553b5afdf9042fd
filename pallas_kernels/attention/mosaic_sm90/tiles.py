"""The order of tiles of rows, and each warpgroup's part of a tile."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.mosaic_sm90.common import WARPGROUP_ROWS
from pallas_kernels.attention.mosaic_sm90.rows import VisibleColumns
from pallas_kernels.attention.ranges import TILE


class Tile(NamedTuple):
    """A tile, or a warpgroup's part of one, and the blocks of columns that its rows see.

    Attributes:
        row: index in the batch.
        first: its first row.
        head: of the queries, or of the keys in the transposed kernel.
        low, high: the blocks [low, high), at least one.
        inner, outer: of these, every row sees all of [inner, outer).
        before: how many blocks below `low` are loaded for the rest of the tile alone.
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


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The tiles that each thread block takes in turn, of an order that has the heaviest first, there and back again.

    Attributes:
        refs: the kernel's references. `order`: the tiles of `TILE` rows of all batch elements in their order, or None
            where causality alone makes it; `start`, `end` (None without documents), and with them the shared memory
            of `shared`.
        rows: the kernel's rows.
        batch: rows of the batch.
        heads: of the queries, or of the keys in the transposed kernel.
        ctas: thread blocks.
        block: columns multiplied at once.
        size: rows of a tile: TILE or WARPGROUP_ROWS.
        members: heads of a tile; of 2 each warpgroup takes one, else 64 of its rows each.
        whole: whether a warpgroup takes all of the tile's blocks, not only those that its rows see.
        slots: tiles whose work can be posted at the same time.
    """

    refs: Any
    rows: VisibleColumns
    batch: int
    heads: int
    ctas: int
    block: int
    size: int = TILE
    members: int = 1
    whole: bool = False
    slots: int = 1

    ARRIVALS = 3
    """Arrivals of a post on its barrier."""

    @staticmethod
    def shared(slots: int, parts: int) -> dict[str, Any]:
        """The shared memory that posts of documents need.

        Args:
            slots: as above.
            parts: of a tile.

        Returns:
            `work`: the numbers of `Tile`; `bounds`: where the rows' documents start and end.
        """
        return {
            "work": plgpu.SMEM((slots, parts, len(Tile._fields)), jnp.int32),
            "bounds": plgpu.SMEM((slots, parts, 2, WARPGROUP_ROWS), jnp.int32),
        }

    def each(self, body: Callable[[Array, Array], Array]) -> None:
        """Take this thread block's tiles in turn: `body(turn, blocks taken so far)` returns the blocks taken now."""
        total = self.batch * self._tiles * (TILE // self.size) * (self.heads // self.members)
        start = jnp.int32(0), jnp.int32(0)
        if self.ctas == total:
            body(*start)
        else:  # asked anew each turn: how many there are is not kept in a register
            lax.while_loop(lambda state: self._place(state[0]) < total, lambda s: (s[0] + 1, body(*s)), start)

    @property
    def _tiles(self) -> int:
        """Number of tiles of `TILE` rows in a row of the batch."""
        return pl.cdiv(self.rows.length, TILE)

    def _place(self, turn: Array) -> Array:
        """Where in the order a turn's tile stands."""
        cta = lax.axis_index("cta")
        return turn * self.ctas + jnp.where(lax.rem(turn, jnp.int32(2)) == 0, cta, self.ctas - 1 - cta)

    def tile(self, turn: Array) -> Tile:
        """The tile of a turn, all of it."""
        parts, groups = TILE // self.size, self.heads // self.members
        place = self._place(turn)
        place, part = lax.div(place, jnp.int32(parts)), lax.rem(place, jnp.int32(parts))
        rank, group = lax.div(place, jnp.int32(groups)), lax.rem(place, jnp.int32(groups))
        if self.refs.order is not None:
            rank = self.refs.order[rank]
            row, index = lax.div(rank, jnp.int32(self._tiles)), lax.rem(rank, jnp.int32(self._tiles))
        else:  # the last queries see most keys, and most queries see the first keys
            row, index = lax.rem(rank, jnp.int32(self.batch)), lax.div(rank, jnp.int32(self.batch))
            index = index if self.rows.transposed else self._tiles - 1 - index
        first = index * TILE + part * self.size
        return Tile(row, first, group * self.members, *self.rows.blocks(row, first, self.size, self.block))

    def _part(self, tile: Tile, part: Array | int) -> Tile:
        """Warpgroup `part`'s part of a tile."""
        if self.members == 2:
            return tile._replace(head=tile.head + part)
        first = tile.first + part * WARPGROUP_ROWS
        if self.whole:
            return tile._replace(first=first)
        low, inner, outer, high = self.rows.blocks(tile.row, first, WARPGROUP_ROWS, self.block)
        low = jnp.clip(low, tile.low, tile.high - 1)
        high = jnp.clip(high, low + 1, tile.high)
        outer = jnp.clip(outer, low, high)
        inner = jnp.clip(inner, low, outer)
        return Tile(tile.row, first, tile.head, low, inner, outer, high, low - tile.low, tile.high - high)

    def post(self, turn: Array, tile: Tile, part: int, full: Any) -> Tile:
        """Warpgroup `part`'s part of a turn's tile; for documents the loading warpgroup writes it to shared memory.

        The others would else wait for global memory at the start of each tile. They may read once `full` is.

        Args:
            turn: int32.
            tile: of that turn.
            part: 0 or 1.
            full: the barrier of the part's rows; with documents it counts `ARRIVALS` more.
        """
        work = self._part(tile, part)
        if self.refs.start is None:
            return work
        slot = lax.rem(turn, jnp.int32(self.slots))
        for index, number in enumerate(work):
            self.refs.work[slot, part, index] = jnp.asarray(number, jnp.int32)
        plgpu.barrier_arrive(full)
        for index, array in enumerate((self.refs.start, self.refs.end)):
            place = (work.row, pl.ds(work.first, WARPGROUP_ROWS))
            plgpu.copy_gmem_to_smem(array.at[place], self.refs.bounds.at[slot, part, index], full)
        return work

    def work(self, turn: Array, part: Array | int) -> Tile:
        """Warpgroup `part`'s part of a turn's tile: computed again, or with documents as posted."""
        if self.refs.start is None:
            return self._part(self.tile(turn), part)
        slot = lax.rem(turn, jnp.int32(self.slots))
        return Tile(*(self.refs.work[slot, part, index] for index in range(len(Tile._fields))))

    def bounds(self, turn: Array, part: Array | int) -> Any:
        """Start and end of the rows' documents in shared memory, int32 [2, WARPGROUP_ROWS]; None without documents."""
        if self.refs.start is None:
            return None
        return self.refs.bounds.at[lax.rem(turn, jnp.int32(self.slots)), part]


def leave(blocks: Array | int, taken: Array, stages: Array, rings: Sequence[tuple[Any, Any]]) -> Array:
    """Release, unread, the next `blocks` blocks of rings of shared memory.

    A block is waited for all the same: else a warpgroup could release the same stage twice before the other has
    released it once.

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
