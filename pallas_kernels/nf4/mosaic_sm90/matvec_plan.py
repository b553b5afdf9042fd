"""Sizes of a call of `matvec`."""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.nf4.codebook import BLOCK
from pallas_kernels.nf4.config import MATVEC_GRAIN, MatvecConfig

TOKENS = 8
"""Rows of x in one product of the tensor cores."""
SEGMENT = MATVEC_GRAIN // 2
"""Bytes of codes of a row that lie side by side in shared memory; a row of their scales is 16 bytes."""
ENTRY = 256
"""Bytes between a table's entries: a byte of codes is the second byte of its entry's place. The lanes take half."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of a call.

    Attributes:
        tokens: rows of x; most of an item.
        out: rows of W.
        summed: columns of W.
        config: block sizes.
        grid: thread blocks.
        items: most items, each with a matrix and rows of its own (`matvec_items`); 0: one matrix for all rows.
        shared: numbers of rows of an item that stand for the same row of x, one after the other.
    """

    tokens: int
    out: int
    summed: int
    config: MatvecConfig
    grid: int
    items: int = 0
    shared: int = 1

    @property
    def token_tiles(self) -> int:
        """Products of the tensor cores side by side."""
        return pl.cdiv(self.tokens, TOKENS)

    @property
    def rows(self) -> int:
        """Rows of W in a tile."""
        return self.config.rows

    @property
    def columns(self) -> int:
        """Columns of a stage."""
        return self.config.columns

    @property
    def blocks(self) -> int:
        """Blocks of a row in a stage."""
        return self.columns // BLOCK

    @property
    def segments(self) -> int:
        """Runs of columns of a stage that lie apart in shared memory."""
        return self.columns // MATVEC_GRAIN

    @property
    def units(self) -> int:
        """Tiles' parts, of a matrix."""
        return pl.cdiv(self.out, self.rows) * self.config.splits

    @property
    def steps(self) -> int:
        """Stages of a part."""
        return pl.cdiv(pl.cdiv(self.summed, self.columns), self.config.splits)

    @property
    def pieces(self) -> int:
        """Sums of 16 rows and eight tokens that a warp has."""
        return self.config.tiles * self.token_tiles

    @property
    def by_tma(self) -> bool:
        """Whether TMA loads the stages. It is slower than the threads' own copies where there is little of x."""
        return self.tokens > TOKENS

    def turns(self, block, items):
        """Units of a thread block, where so many items are in use."""
        units = self.units * items if self.items else self.units
        return lax.div(units + self.grid - 1 - block, jnp.int32(self.grid))

    def unit(self, block, turn):
        """Item, first row, and the part of its sum, of a thread block's `turn`th unit."""
        number, splits, item = block + turn * self.grid, jnp.int32(self.config.splits), None
        if self.items:
            item, number = lax.div(number, jnp.int32(self.units)), lax.rem(number, jnp.int32(self.units))
        # The last tile is moved back to end with the array: it repeats what its neighbour writes.
        first = lax.min(lax.div(number, splits) * self.rows, jnp.int32(self.out - self.rows))
        return item, first, lax.rem(number, splits)
