"""Stream-K: the iterations of all output tiles of a matrix product, shared out evenly among thread blocks.

Osama et al., "Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Multiplication on the GPU" (PPoPP 2023,
arXiv 2301.03598). The iterations of all tiles are numbered through, and a thread block takes a contiguous range, which
may begin and end inside a tile. A thread block that does not finish a tile stores its partial sums; the one with the
tile's last iteration waits for them and adds them up (fix-up).

Departure from the paper: a thread block works on its last tile first. A tile's early iterations are the last tile of
their thread block, so their partial sums are stored long before the fix-up needs them.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels.nf4.config import RS_TERMS, MatmulRsConfig


class Segment(NamedTuple):
    """Iterations [begin, end) of a tile whose first element is at (row, column)."""

    tile: Any
    row: Any
    column: Any
    begin: Any
    end: Any


class StreamK(NamedTuple):
    """The iterations of each thread block (or cluster: one "cta" here either way).

    Attributes:
        tile_rows: rows of a tile.
        tile_columns: columns of a tile.
        columns: of the result.
        row_tiles: tiles below each other.
        iterations: of a tile, RS_TERMS terms of the sum each.
        total: iterations of all tiles.
        grain: iterations that stay together: one (Stream-K, fixed-split) or all of a tile (data-parallel).
        ctas: grid size.
    """

    tile_rows: int
    tile_columns: int
    columns: int
    row_tiles: int
    iterations: int
    total: int
    grain: int
    ctas: int

    @classmethod
    def of(cls, rows: int, columns: int, summed: int, config: MatmulRsConfig, cores: int) -> "StreamK":
        """The decomposition of a product [rows, columns] over `summed` terms for at most `cores` thread blocks."""
        row_tiles, iterations = pl.cdiv(rows, config.rows), summed // RS_TERMS
        tiles = row_tiles * pl.cdiv(columns, config.columns)
        total, grain = tiles * iterations, iterations if config.splits == 1 else 1
        ctas = min(cores, total // grain, tiles * config.splits if config.splits else cores)
        return cls(config.rows, config.columns, columns, row_tiles, iterations, total, grain, ctas)

    @property
    def needs_fixup(self) -> bool:
        """Whether several thread blocks share a tile."""
        return any(cta * self.total // self.ctas % self.iterations for cta in range(self.ctas)) and self.grain == 1

    def begin(self, cta):
        """The first iteration of a thread block; that of the next one is its end."""
        return lax.div(cta * (self.total // self.grain), jnp.int32(self.ctas)) * self.grain

    def cta_of(self, iteration):
        """The thread block that takes an iteration."""
        grain = lax.div(iteration, jnp.int32(self.grain))
        return lax.div((grain + 1) * self.ctas - 1, jnp.int32(self.total // self.grain))

    def segments(self, cta):
        """Number of tiles that a thread block works on."""
        last = lax.div(self.begin(cta + 1) - 1, jnp.int32(self.iterations))
        return last - lax.div(self.begin(cta), jnp.int32(self.iterations)) + 1

    def segment(self, cta, turn) -> Segment:
        """A thread block's part of its `turn`th tile, counted from its last one down."""
        begin, end = self.begin(cta), self.begin(cta + 1)
        tile = lax.div(end - 1, jnp.int32(self.iterations)) - turn
        row = lax.rem(tile, jnp.int32(self.row_tiles)) * self.tile_rows
        column = self.own_column(tile)
        # The last tile is moved back to end with the array.
        column = lax.min(column, jnp.int32(self.columns - self.tile_columns))
        first = tile * self.iterations
        return Segment(tile, row, column, lax.max(begin - first, 0), lax.min(end - first, jnp.int32(self.iterations)))

    def own_column(self, tile):
        """The first column that no earlier tile has."""
        return lax.div(tile, jnp.int32(self.row_tiles)) * self.tile_columns

    def place(self, cta, count):
        """First row, first column and first term of the sum of a thread block's `count`th iteration."""
        first = self.segment(cta, 0)
        behind = count - (first.end - first.begin)
        turn = lax.select(behind < 0, jnp.int32(0), lax.div(behind, jnp.int32(self.iterations)) + 1)
        segment = self.segment(cta, turn)
        step = segment.begin + lax.select(behind < 0, count, lax.rem(behind, jnp.int32(self.iterations)))
        return segment.row, segment.column, step * RS_TERMS


def fence():
    """Make everything the warpgroup has written visible on the device before what one of its threads writes next."""

    @plgpu.inline_mgpu()
    def fence(_):
        mgpu.utils.warpgroup_barrier()
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], "fence.acq_rel.gpu;", "~{memory}", has_side_effects=True)

    fence()  # pyright: ignore[reportCallIssue]  # the decorator takes the context away
