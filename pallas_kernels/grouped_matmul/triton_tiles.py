"""Loads and stores of the Triton kernels: tiles of any rows and columns of a matrix, masked behind its end."""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import triton as pltriton

Ref = Any


def numbers(first: Array, count: int) -> Array:
    """first, first + 1, …, int32[count]."""
    return first + lax.iota(jnp.int32, count)


def load_tile(
    ref: Ref, group: tuple[Array, ...], rows: Array, columns: Array, *, own: Array | None = None, span: int = 0
) -> Array:
    """A tile of a matrix, or of one of a group, with zeros where a mask hides it.

    Args:
        ref: [height, width], or [groups, height, width].
        group: (), or the group's number.
        rows: int32.
        columns: int32.
        own: bool, rows to be read, all inside the matrix; None: those before its end.
        span: columns from a tile's first to the next tile's; 0: as many as it has.
    """
    mask = _mask(ref, rows, columns, own, span)
    other = None if mask is None else jnp.zeros((), ref.dtype)
    return pltriton.load(ref.at[(*group, rows[:, None], columns[None, :])], mask=mask, other=other)


def store_tile(
    ref: Ref,
    group: tuple[Array, ...],
    rows: Array,
    columns: Array,
    tile: Array,
    *,
    own: Array | None = None,
    span: int = 0,
) -> None:
    """Write a tile, rounded to the matrix's dtype, where no mask hides it; arguments as of `load_tile`."""
    mask = _mask(ref, rows, columns, own, span)
    pltriton.store(ref.at[(*group, rows[:, None], columns[None, :])], tile.astype(ref.dtype), mask=mask)


def _mask(ref: Ref, rows: Array, columns: Array, own: Array | None, span: int) -> Array | None:
    """None where no tile reaches behind the end: a mask on columns keeps loads from being wide."""
    height, width = ref.shape[-2:]
    if own is None and height % rows.shape[0]:
        own = rows < height
    inside = columns < width if width % (span or columns.shape[0]) else None
    if own is None or inside is None:
        return own[:, None] if own is not None else None if inside is None else inside[None, :]
    return own[:, None] & inside[None, :]
