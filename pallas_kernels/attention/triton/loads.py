"""Loads and stores of tiles whose head size need not be a power of two and whose last rows may not be there."""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

Ref = Any


def padded(size: int) -> int:
    """The head size as Triton sees it: a power of two, at least one matrix instruction deep."""
    return max(16, pl.next_power_of_2(size))


def rows_of(first: Array, count: int) -> Array:
    """The numbers of a tile's rows, int32[count]."""
    return first + lax.iota(jnp.int32, count)


def load_rows(ref: Ref, first: Array, count: int, size: int, *, limit: int | None) -> Array:
    """Rows [first, first + count) of [rows, padded(size)]; zeros in columns from size and rows from limit on."""
    width = ref.shape[-1]
    mask = _mask(first, count, width, size, limit)
    other = None if mask is None else jnp.zeros((), ref.dtype)
    return pltriton.load(ref.at[pl.ds(first, count), :], mask=mask, other=other)


def store_rows(ref: Ref, first: Array, values: Array, size: int, *, length: int) -> None:
    """Write [count, padded(size)] to rows [first, first + count), but for columns from size and rows from length on."""
    count, width = values.shape
    mask = _mask(first, count, width, size, length if length % count else None)
    pltriton.store(ref.at[pl.ds(first, count), :], values.astype(ref.dtype), mask=mask)


def load_numbers(ref: Ref, first: Array, count: int, *, limit: int | None, other: float | int) -> Array:
    """Numbers [first, first + count) of a row, `other` from limit on."""
    where = pl.ds(first, count)
    if limit is None:
        return ref[where]
    return pltriton.load(ref.at[where], mask=rows_of(first, count) < limit, other=jnp.asarray(other, ref.dtype))


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
