"""How the steps of a matrix product are shared out among thread blocks."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.nf4.config import FusedConfig, RegistersConfig


class Segment(NamedTuple):
    """Steps [begin, end) of the sum of a tile, whose first element is at (row, column)."""

    tile: Any
    row: Any
    column: Any
    begin: Any
    end: Any


class Work(NamedTuple):
    """Which steps of which tiles each thread block takes.

    All steps of all tiles are numbered through; a thread block takes a range, its last tile first. So the first parts
    of tiles that are cut are done early, and who takes the last part finds them done: it adds them up.

    Attributes:
        rows: of a tile.
        columns: of a tile.
        all_columns: of the result.
        row_tiles: tiles below each other.
        terms: of the sum, in a step.
        steps: of a tile.
        total: steps of all tiles.
        grain: steps that are never cut: one, or all of a tile.
        ctas: thread blocks, or clusters of them, that work.
    """

    rows: int
    columns: int
    all_columns: int
    row_tiles: int
    terms: int
    steps: int
    total: int
    grain: int
    ctas: int

    @classmethod
    def of(
        cls, rows: int, columns: int, summed: int, config: FusedConfig | RegistersConfig, terms: int, cores: int
    ) -> "Work":
        """The work of a product [rows, columns] over `summed` terms on so many multiprocessors."""
        row_tiles, steps = pl.cdiv(rows, config.rows), summed // terms
        tiles = row_tiles * pl.cdiv(columns, config.columns)
        total, grain = tiles * steps, steps if config.parts == 1 else 1
        ctas = min(cores, total // grain, tiles * config.parts if config.parts else cores)
        return cls(config.rows, config.columns, columns, row_tiles, terms, steps, total, grain, ctas)

    @property
    def cut(self) -> bool:
        """Whether there are tiles that several thread blocks share."""
        return any(cta * self.total // self.ctas % self.steps for cta in range(self.ctas)) and self.grain == 1

    def begin(self, cta):
        """The first step of a thread block."""
        return lax.div(cta * (self.total // self.grain), jnp.int32(self.ctas)) * self.grain

    def owner(self, step):
        """The thread block that takes a step."""
        step = lax.div(step, jnp.int32(self.grain))
        return lax.div((step + 1) * self.ctas - 1, jnp.int32(self.total // self.grain))

    def segments(self, cta):
        """How many tiles a thread block works on."""
        last = lax.div(self.begin(cta + 1) - 1, jnp.int32(self.steps))
        return last - lax.div(self.begin(cta), jnp.int32(self.steps)) + 1

    def segment(self, cta, turn) -> Segment:
        """The `turn`th of them."""
        begin, end = self.begin(cta), self.begin(cta + 1)
        tile = lax.div(end - 1, jnp.int32(self.steps)) - turn
        row = lax.rem(tile, jnp.int32(self.row_tiles)) * self.rows
        column = self.own_column(tile)
        # The last tile is moved back to end with the array.
        column = lax.min(column, jnp.int32(self.all_columns - self.columns))
        first = tile * self.steps
        return Segment(tile, row, column, lax.max(begin - first, 0), lax.min(end - first, jnp.int32(self.steps)))

    def own_column(self, tile):
        """The first column that no tile before this one has."""
        return lax.div(tile, jnp.int32(self.row_tiles)) * self.columns

    def place(self, cta, count):
        """First row, first column and first term of the sum of a thread block's `count`th step."""
        first = self.segment(cta, 0)
        behind = count - (first.end - first.begin)
        turn = lax.select(behind < 0, jnp.int32(0), lax.div(behind, jnp.int32(self.steps)) + 1)
        found = self.segment(cta, turn)
        step = found.begin + lax.select(behind < 0, count, lax.rem(behind, jnp.int32(self.steps)))
        return found.row, found.column, step * self.terms
