"""Which key a query sees. Packed rows, padding, causality and a cache are all one boolean array."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def visible(
    positions: Int[Array, "#B S"],
    keys: int,
    segment_ids: Int[Array, "B S"] | None,
    kv_segment_ids: Int[Array, "B T"] | None,
    *,
    causal: bool,
) -> Bool[Array, "#B S T"] | None:
    """True where the query may look at the key.

    Args:
        positions: the index of each query among the keys.
        keys: T.
        segment_ids: the document of each query, from 1; 0 is padding, which sees nothing and is not seen.
        kv_segment_ids: the document of each key, likewise.
        causal: whether a query sees only keys up to its own position.

    Returns:
        The mask, or None where every query sees every key.
    """
    mask = None
    if causal:
        mask = positions[:, :, None] >= jnp.arange(keys, dtype=jnp.int32)[None, None, :]
    if segment_ids is not None and kv_segment_ids is not None:
        same = same_document(segment_ids, kv_segment_ids)
        mask = same if mask is None else mask & same
    return mask


def same_document(segment_ids: Int[Array, "B S"], kv_segment_ids: Int[Array, "B T"]) -> Bool[Array, "B S T"]:
    """True where query and key belong to one document; padding (0) belongs to none."""
    return (segment_ids[:, :, None] == kv_segment_ids[:, None, :]) & (segment_ids != 0)[:, :, None]
