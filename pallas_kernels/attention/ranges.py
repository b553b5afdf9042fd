"""Packed documents as ranges, by which a kernel skips whole tiles.

Documents are contiguous in a packed row, so the keys of a query's document are a range, and so are the queries of a
key's document. Both ends of both ranges never decrease along the row; the first and last row of a tile
therefore bound all of it, and a tile outside the bounds is skipped in the forward and the backward pass.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int, Int32

from pallas_kernels.transformations import with_automatic_axes

TILE = 128
"""Rows of a tile in the orders below; the kernels' tiles of queries and of keys."""


class SegmentRanges(NamedTuple):
    """The documents of packed rows as ranges; made once a batch by `segment_ranges`, for all layers.

    Every leaf leads with the rows of the batch and speaks of its own row alone, so the ranges are split over devices
    as the batch is.

    Attributes:
        k_start, k_end: the keys [k_start, k_end) of each query's document; empty for padding.
        q_start, q_end: the queries [q_start, q_end) of each key's document; empty for padding.
        q_order: each row's tiles of `TILE` queries, those that see most keys first (causal); `order_of_all` joins the
            rows.
        k_order: each row's tiles of `TILE` keys, those that most queries see first.
    """

    k_start: Int32[Array, "B S"]
    k_end: Int32[Array, "B S"]
    q_start: Int32[Array, "B T"]
    q_end: Int32[Array, "B T"]
    q_order: Int32[Array, "B QT"]
    k_order: Int32[Array, "B KT"]


def segment_ranges(
    segment_ids: Int[Array, "B S"],
    kv_segment_ids: Int[Array, "B T"] | None = None,
) -> SegmentRanges:
    """The ranges of the documents in packed rows.

    Args:
        segment_ids: the document of each query, from 1 and never decreasing along the row but for padding (0), which
            sees nothing and is not seen.
        kv_segment_ids: the document of each key; segment_ids by default.

    Returns:
        The ranges. Under jit the order of the documents can not be checked: a document in several pieces, or documents
        out of order, give ranges that are wrong.

    Raises:
        ValueError: ids of other shapes; documents in several pieces or out of order, where the ids are known.
    """
    kv_segment_ids = segment_ids if kv_segment_ids is None else kv_segment_ids
    if segment_ids.ndim != 2 or kv_segment_ids.ndim != 2 or segment_ids.shape[0] != kv_segment_ids.shape[0]:
        raise ValueError(
            "segment_ranges: expected segment_ids [batch, queries] and kv_segment_ids [batch, keys], got "
            f"{segment_ids.shape} and {kv_segment_ids.shape}"
        )
    for name, ids in (("segment_ids", segment_ids), ("kv_segment_ids", kv_segment_ids)):
        reason = not_contiguous(ids)
        if reason is not None:
            raise ValueError(f"segment_ranges: {name}: {reason}")

    def ranges(segment_ids: Array, kv_segment_ids: Array) -> SegmentRanges:
        queries, keys = _carried(segment_ids), _carried(kv_segment_ids)
        k_start, k_end = _range(queries, keys, segment_ids, kv_segment_ids)
        q_start, q_end = _range(keys, queries, kv_segment_ids, segment_ids)
        return ordered(k_start, k_end, q_start, q_end)

    return with_automatic_axes(ranges, segment_ids, kv_segment_ids, rows_like=segment_ids)


def ordered(
    k_start: Int32[Array, "B S"],
    k_end: Int32[Array, "B S"],
    q_start: Int32[Array, "B T"],
    q_end: Int32[Array, "B T"],
    *,
    causal: bool = True,
) -> SegmentRanges:
    """Ranges with the orders of their tiles.

    Args:
        k_start: first key of each query.
        k_end: behind its last key; like the others never decreasing along the row.
        q_start: first query of each key.
        q_end: behind its last query.
        causal: whether query s sees no key behind s, beside the ranges.
    """
    last, first = k_end, q_start
    if causal:
        last = jnp.minimum(k_end, jnp.arange(k_end.shape[1], dtype=jnp.int32)[None] + 1)
        first = jnp.maximum(q_start, jnp.arange(q_start.shape[1], dtype=jnp.int32)[None])
    orders = _heaviest_first(k_start, last), _heaviest_first(first, q_end)
    return SegmentRanges(k_start, k_end, q_start, q_end, *orders)


def order_of_all(order: Int32[Array, "B QT"]) -> Int32[Array, " B*QT"]:
    """The tiles of all rows, each as row · QT + tile: every row's heaviest, then every row's next.

    Args:
        order: `SegmentRanges.q_order` or `k_order`.
    """
    rows, tiles = order.shape
    return (order + tiles * jnp.arange(rows, dtype=jnp.int32)[:, None]).T.reshape(-1)


def not_contiguous(segment_ids: Int[Array, "B S"]) -> str | None:
    """Why the documents are not ranges in order; None where they are, or where only run time tells."""
    if isinstance(segment_ids, Tracer):
        return None
    for row, ids in enumerate(np.asarray(segment_ids)):
        documents = ids[ids != 0]
        places = np.flatnonzero(ids != 0)
        drops = np.flatnonzero(np.diff(documents) < 0)
        if drops.size:
            before, after = documents[drops[0] : drops[0] + 2]
            return (
                f"expected documents in order and in one piece, got document {after} after document {before} at row "
                f"{row}, place {places[drops[0] + 1]}"
            )
        holes = np.flatnonzero((np.diff(documents) == 0) & (np.diff(places) > 1))
        if holes.size:
            return (
                f"expected documents in one piece, got padding within document {documents[holes[0]]} at row {row}, "
                f"place {places[holes[0]] + 1}"
            )
    return None


def _carried(ids: Array) -> Array:
    """Ids that never decrease: padding takes that of the document before it."""
    return jax.lax.cummax(jnp.asarray(ids, jnp.int32), axis=1)


def _range(rows: Array, columns: Array, row_ids: Array, column_ids: Array) -> tuple[Array, Array]:
    """For each row the columns of its document; for padding the empty range behind the document before it."""
    search = jax.vmap(jnp.searchsorted, in_axes=(0, 0))
    before = jnp.pad(jnp.cumsum(jnp.asarray(column_ids) != 0, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
    start = search(columns, rows).astype(jnp.int32)
    behind = search(columns, rows + 1).astype(jnp.int32)
    end = start + jnp.take_along_axis(before, behind, 1) - jnp.take_along_axis(before, start, 1)
    return jnp.where(jnp.asarray(row_ids) == 0, end, start), end


def _heaviest_first(start: Array, end: Array) -> Array:
    """Each row's tiles by the number of columns between their first start and their last end."""
    missing = -start.shape[1] % TILE
    first = jnp.pad(start, ((0, 0), (0, missing)), mode="edge")[:, ::TILE]
    last = jnp.pad(end, ((0, 0), (0, missing)), mode="edge")[:, TILE - 1 :: TILE]
    return jnp.argsort(first - last, axis=1, stable=True).astype(jnp.int32)
