"""A kernel's rows (queries, or keys in the transposed kernel): which columns they see."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.attention.call import Options
from pallas_kernels.attention.mosaic_sm90.common import MASKED, ROWS, WARPGROUP_ROWS, broadcast_rows


class VisibleColumns(NamedTuple):
    """The mask of a kernel's rows (queries, or keys in the transposed kernel): each sees the columns [start, end).

    Attributes:
        start, end: of each row's document, int32 [B, rows padded to tiles] in global memory; None: all columns.
        offset: int32 [1 or B] in global memory: a query's index plus offset is its place among the keys; not used where
            the options have it.
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
        """A row's index plus shift is its place among the columns."""
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
        """The end of rows' columns; arguments as in `_start`."""
        causal, window = self.options.causal, self.options.sliding_window
        if causal and not self.transposed:
            end = jnp.minimum(end, rows + (shift + 1))
        if window is not None and (self.transposed or not causal):
            end = jnp.minimum(end, rows + (shift + window))
        return end

    def _of_tile(self, batch: Array, first: Array, rows: int) -> tuple[Array, Array, Array, Array]:
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

    def blocks(self, batch: Array, first: Array, count: int, block: int) -> tuple[Array, Array, Array, Array]:
        """Which blocks of columns a tile takes: (low, inner, outer, high).

        Args:
            batch: index in the batch.
            first: the first of the tile's rows.
            count: how many rows.
            block: columns in a block.

        Returns:
            The tile takes [low, high), at least one block; of these, every row sees all of [inner, outer).
        """
        start_low, start_high, end_low, end_high = self._of_tile(batch, first, count)
        size = jnp.int32(block)
        low = lax.div(jnp.clip(start_low, 0, self.columns - 1), size)
        high = jnp.maximum(lax.div(jnp.maximum(end_high, 0) + (block - 1), size), low + 1)
        outer = jnp.clip(lax.div(jnp.maximum(end_low, 0), size), low, high) if self.bounded_above else high
        inner = jnp.clip(lax.div(jnp.maximum(start_high, 0) + (block - 1), size), low, outer)
        return low, inner, outer, high

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
