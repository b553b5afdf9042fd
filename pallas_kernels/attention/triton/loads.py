"""Loads and stores of tiles with any head size, and with rows behind the last one."""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

Ref = Any


def padded(size: int) -> int:
    """The padded head size: a power of two, at least one matrix instruction deep."""
    return max(16, pl.next_power_of_2(size))


def rows_of(first: Array, count: int) -> Array:
    """The numbers of a tile's rows, int32[count]."""
    return first + lax.iota(jnp.int32, count)


def load_rows(ref: Ref, first: Array, count: int, size: int, *, limit: int | None, head: Array | None = None) -> Array:
    """Rows [first, first + count) of [rows, padded(size)], or of one head of [rows, heads, padded(size)].

    Zeros in columns from size on and in rows from limit on.
    """
    width = ref.shape[-1]
    mask = _mask(first, count, width, size, limit)
    other = None if mask is None else jnp.zeros((), ref.dtype)
    where = pl.ds(first, count)
    rows = ref.at[where, :] if head is None else ref.at[where, head, :]
    return pltriton.load(rows, mask=mask, other=other)


def store_rows(ref: Ref, first: Array, values: Array, size: int, *, length: int) -> None:
    """Write [count, padded(size)] to rows [first, first + count), but for columns from size and rows from length on."""
    count, width = values.shape
    mask = _mask(first, count, width, size, length if length % count else None)
    pltriton.store(ref.at[pl.ds(first, count), :], values.astype(ref.dtype), mask=mask)


def load_numbers(
    ref: Ref, first: Array, count: int, *, limit: int | None, other: float | int, head: Array | None = None
) -> Array:
    """Numbers [first, first + count) of [rows], or of one head of [heads, rows]; `other` from limit on."""
    where = pl.ds(first, count)
    numbers = ref.at[where] if head is None else ref.at[head, where]
    if limit is None:
        return pltriton.load(numbers)
    return pltriton.load(numbers, mask=rows_of(first, count) < limit, other=jnp.asarray(other, ref.dtype))


def store_numbers(ref: Ref, first: Array, values: Array, *, length: int) -> None:
    """Write [count] to the numbers [first, first + count) of a row, but for those from length on."""
    count = values.shape[0]
    mask = rows_of(first, count) < length if length % count else None
    pltriton.store(ref.at[pl.ds(first, count)], values, mask=mask)


def _mask(first: Array, count: int, width: int, size: int, limit: int | None) -> Array | None:
    columns = None if size == width else (lax.iota(jnp.int32, width) < size)[None, :]
    rows = None if limit is None else (rows_of(first, count) < limit)[:, None]
    if columns is None or rows is None:
        return rows if columns is None else columns
    return rows & columns
