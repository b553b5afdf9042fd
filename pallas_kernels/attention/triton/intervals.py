"""The keys that a query sees, as intervals, and the tiles that a program visits.

Every part of the mask is an interval: causality, a sliding window and documents each give a query the keys
[low, high), with both ends never decreasing along the row, and a key the queries [low, high) in the same way. So the
first and the last row of a tile bound all of it: tiles outside every row's interval are never visited, those inside all
of them need no mask, and only the others pay for one.
"""

import functools
import operator
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.attention.call import Options
from pallas_kernels.attention.triton.loads import Ref, load_numbers

Carry = TypeVar("Carry")


class Interval(NamedTuple):
    """Columns [low, high): int32, one number or one for each row of a tile; None is no bound but the array's own."""

    low: Array | None
    high: Array | None

    def mask(self, columns: Array, limit: int | None) -> Array:
        """Bool [rows, columns]: whether a row's interval holds a column, below the limit if any."""
        columns = columns[None, :]
        conditions = [] if limit is None else [columns < limit]
        if self.low is not None:
            conditions.append(columns >= self.low[:, None])
        if self.high is not None:
            conditions.append(columns < self.high[:, None])
        return functools.reduce(operator.and_, conditions)


class Ranges(NamedTuple):
    """The documents' intervals of a row of the batch: references to int32[length]."""

    start: Ref
    end: Ref

    def at(self, row: Array) -> Interval:
        """The interval of one row."""
        return Interval(self.start[row], self.end[row])

    def of(self, first: Array, count: int, length: int) -> Interval:
        """The intervals of a tile of rows; empty behind the last row."""
        limit = length if length % count else None
        return Interval(*(load_numbers(ref, first, count, limit=limit, other=0) for ref in self))


def keys_of(queries: Array, document: Interval | None, offset: Array, options: Options) -> Interval:
    """The keys that queries see; `document` holds the keys of each one's document."""
    low, high = (None, None) if document is None else document
    window, position = options.sliding_window, queries + offset
    if options.causal:
        high = _least(high, position + 1)
    elif window is not None:
        high = _least(high, position + window)
    if window is not None:
        low = _most(low, position - (window - 1))
    return Interval(low, high)


def queries_of(keys: Array, document: Interval | None, offset: Array, options: Options) -> Interval:
    """The queries that see keys; `document` holds the queries of each one's document."""
    low, high = (None, None) if document is None else document
    window, position = options.sliding_window, keys - offset
    if options.causal:
        low = _most(low, position)
    elif window is not None:
        low = _most(low, position - (window - 1))
    if window is not None:
        high = _least(high, position + window)
    return Interval(low, high)


def visit(
    body: Callable[..., Carry],
    carry: Carry,
    first: Interval,
    last: Interval,
    *,
    tile: int,
    length: int,
    repeats: int = 1,
) -> Carry:
    """Run `body(tile, repeat, carry, masked=…)` for each tile of columns that a tile of rows sees.

    Tiles without a mask come first, then the masked ones. Each of the two is a single loop over all repeats, so
    that its loads are pipelined across them.

    Args:
        body: the loop's body; `tile` and `repeat` are int32.
        carry: its initial value.
        first: the columns of the tile's first row.
        last: those of its last row.
        tile: columns of a tile.
        length: columns there are.
        repeats: how often the tiles are visited.
    """
    begin, inner_begin = jnp.int32(0), jnp.int32(0)
    end, inner_end = jnp.int32(pl.cdiv(length, tile)), jnp.int32(length // tile)
    if first.low is not None and last.low is not None:
        begin = _quotient(first.low, tile)
        inner_begin = _quotient(last.low + (tile - 1), tile)
    if first.high is not None and last.high is not None:
        end = jnp.minimum(end, _quotient(last.high + (tile - 1), tile))
        inner_end = jnp.minimum(inner_end, _quotient(first.high, tile))
    end = jnp.maximum(end, begin)
    inner_begin = jnp.minimum(inner_begin, end)
    inner_end = jnp.clip(inner_end, inner_begin, end)

    def loop(count: Array, place: Callable[[Array], Array], masked: bool, carry: Carry) -> Carry:
        def step(number: Array, carry: Carry) -> Carry:
            repeat = jnp.int32(0)
            if repeats > 1:
                repeat = lax.div(number, count)
                number = number - repeat * count
            return body(place(number), repeat, carry, masked=masked)

        return lax.fori_loop(jnp.int32(0), count * repeats, step, carry)

    carry = loop(inner_end - inner_begin, lambda number: inner_begin + number, False, carry)
    if first.low is None and first.high is None and length % tile == 0:
        return carry
    before = inner_begin - begin

    def outside(number: Array) -> Array:
        if first.low is None:
            return inner_end + number
        return number + jnp.where(number < before, begin, inner_end - before)

    return loop(before + end - inner_end, outside, True, carry)


def _least(bound: Array | None, other: Array) -> Array:
    return other if bound is None else jnp.minimum(bound, other)


def _most(bound: Array | None, other: Array) -> Array:
    return other if bound is None else jnp.maximum(bound, other)


def _quotient(number: Array, divisor: int) -> Array:
    """⌊number / divisor⌋, 0 for negative numbers."""
    return lax.div(jnp.maximum(number, 0), jnp.int32(divisor))
