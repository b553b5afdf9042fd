"""The mask: packed rows, padding, causality, a window and a cache as one boolean array."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int32

from pallas_kernels.attention.call import Mask, Options


class Queries(NamedTuple):
    """The part of the mask that belongs to a block of queries; every leaf has the queries on its axis 1.

    Attributes:
        index: the place of each query in its row.
        segment_ids: as in `Mask`, of these queries.
        k_start, k_end: the keys of each query's document, where the mask has ranges.
    """

    index: Int32[Array, "1 S"]
    segment_ids: Int[Array, "B S"] | None
    k_start: Int32[Array, "B S"] | None
    k_end: Int32[Array, "B S"] | None


def queries_of(mask: Mask, length: int) -> Queries:
    """The part of the mask that belongs to its queries.

    Args:
        mask: of the call.
        length: S, the queries of a row.
    """
    index = jnp.arange(length, dtype=jnp.int32)[None, :]
    if mask.segment_ids is not None or mask.ranges is None:
        return Queries(index, mask.segment_ids, None, None)
    return Queries(index, None, mask.ranges.k_start, mask.ranges.k_end)


def visible(queries: Queries, mask: Mask, keys: int, options: Options) -> Bool[Array, "#B S T"] | None:
    """True where the query may look at the key.

    Args:
        queries: `queries_of` the mask, or a block of it.
        mask: of the call.
        keys: T.
        options: of the call.

    Returns:
        The mask, or None where every query sees every key.
    """
    conditions = []
    place = jnp.arange(keys, dtype=jnp.int32)[None, None, :]
    position = (queries.index + mask.query_offset[:, None])[:, :, None]
    if options.causal:
        conditions.append(place <= position)
    if options.sliding_window is not None:
        conditions.append(place > position - options.sliding_window)
        if not options.causal:
            conditions.append(place < position + options.sliding_window)
    if queries.segment_ids is not None and mask.kv_segment_ids is not None:
        segments = queries.segment_ids[:, :, None]
        conditions.append((segments == mask.kv_segment_ids[:, None, :]) & (segments != 0))
    if queries.k_start is not None and queries.k_end is not None:
        conditions.append((queries.k_start[:, :, None] <= place) & (place < queries.k_end[:, :, None]))
    if not conditions:
        return None
    allowed = conditions[0]
    for condition in conditions[1:]:
        allowed = allowed & condition
    return allowed
