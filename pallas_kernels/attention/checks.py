"""Checks of attention's arguments: one error for each thing that does not fit."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from pallas_kernels.attention.call import Options
from pallas_kernels.attention.ranges import TILE, SegmentRanges

_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16), jnp.dtype(jnp.float32))


def arrays(q: Array, k: Array, v: Array, sinks: Array | None) -> None:
    """Refuse queries, keys, values and sinks whose shapes or dtypes do not fit.

    Raises:
        ValueError: they do not.
    """
    fitting = q.ndim == k.ndim == v.ndim == 4 and k.shape[:3] == v.shape[:3]
    fitting = (
        fitting and k.shape[0] == q.shape[0] and k.shape[3] == q.shape[3] and 0 not in (*q.shape, *k.shape, *v.shape)
    )
    if not fitting or q.shape[2] % k.shape[2]:
        raise ValueError(
            "attention: q must be [batch, queries, heads, head size], k [batch, keys, key heads, head size] and v "
            "[batch, keys, key heads, size of a value], nowhere empty, with a number of key heads that divides q's "
            f"heads, got q {q.shape}, k {k.shape}, v {v.shape}"
        )
    if not q.dtype == k.dtype == v.dtype or q.dtype not in _DTYPES:
        raise ValueError(
            "attention: q, k and v must have one dtype, bfloat16, float16 or float32, got "
            f"{q.dtype}, {k.dtype}, {v.dtype}"
        )
    if sinks is not None and (sinks.shape != (q.shape[2],) or sinks.dtype != jnp.float32):
        raise ValueError(
            f"attention: sinks must be float32, one for each of {q.shape[2]} heads, got {sinks.dtype}{sinks.shape}"
        )


def documents(
    q: Array, k: Array, segment_ids: Array | None, kv_segment_ids: Array | None, ranges: SegmentRanges | None
) -> None:
    """Refuse ids and ranges of documents that do not fit the queries and keys.

    Raises:
        ValueError: they do not.
    """
    if ranges is not None and (segment_ids is not None or kv_segment_ids is not None):
        raise ValueError("attention: expected segment_ids or segment_ranges, which are made of them, got both")
    if segment_ids is not None and kv_segment_ids is None:
        kv_segment_ids = segment_ids
    if kv_segment_ids is not None and (
        segment_ids is None or segment_ids.shape != q.shape[:2] or kv_segment_ids.shape != k.shape[:2]
    ):
        raise ValueError(
            f"attention: segment_ids must be [batch, queries] = {q.shape[:2]} and kv_segment_ids [batch, keys] = "
            f"{k.shape[:2]} (both, where they differ), got {None if segment_ids is None else segment_ids.shape} and "
            f"{kv_segment_ids.shape}"
        )
    for name, ids in (("segment_ids", segment_ids), ("kv_segment_ids", kv_segment_ids)):
        if ids is not None and not jnp.issubdtype(ids.dtype, jnp.integer):
            raise ValueError(f"attention: {name} must be integers, got {ids.dtype}")
    if ranges is None:
        return
    (batch, queries), keys = q.shape[:2], k.shape[1]
    expected = {
        "k_start": queries,
        "k_end": queries,
        "q_start": keys,
        "q_end": keys,
        "q_order": -(-queries // TILE),
        "k_order": -(-keys // TILE),
    }
    for name, length in expected.items():
        leaf = getattr(ranges, name)
        if leaf.shape != (batch, length) or leaf.dtype != jnp.int32:
            raise ValueError(
                f"attention: segment_ranges.{name} must be int32{(batch, length)} for {queries} queries and {keys} "
                f"keys a row, got {leaf.dtype}{leaf.shape}"
            )


def options(given: Options, dropout_key: Any) -> None:
    """Refuse options outside their range.

    Raises:
        ValueError: one is.
    """
    window, cap, rate = given.sliding_window, given.logits_soft_cap, given.dropout_rate
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        raise ValueError(f"attention: sliding_window must be None or a whole number of at least 1, got {window!r}")
    if cap is not None and not cap > 0:
        raise ValueError(f"attention: logits_soft_cap must be None or more than 0, got {cap!r}")
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"attention: dropout_rate must be at least 0 and less than 1, got {rate!r}")
    if rate > 0.0 and dropout_key is None:
        raise ValueError(f"attention: dropout_rate {rate!r} needs a dropout_key, got None")
