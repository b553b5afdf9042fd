"""Attention for XLA, block of queries by block of queries, with FlashAttention's backward pass (arXiv 2307.08691).

The residuals are q, k, v, the output and the log-sum-exp of each query's logits; the probabilities are computed again
from them, so memory stays linear in the sequence: at most one block of float32 logits lives at a time. With
P = exp(scale · q kᵀ − lse) and δ = rowsum(dout ∘ out):

    dv = Pᵀ dout      dS = P ∘ (dout vᵀ − δ)      dq = scale · dS k      dk = scale · dSᵀ q

Products of 16-bit inputs are accumulated in float32, and what enters the next product is rounded to the inputs' dtype
first. float32 inputs use float32 products (precision "highest"). Key heads are shared by reshaping q, never by
repeating k and v. A query that sees no key gives zeros and passes no gradient.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.attention.config import SAVEABLE_NAMES
from pallas_kernels.attention.mask import visible


class _Queries(NamedTuple):
    """What belongs to queries, cut into blocks along S; K key heads of G query heads each."""

    q: Array  # [B, S, K, G, D]
    positions: Array  # [B or 1, S]
    segment_ids: Array | None  # [B, S]


class _Gradients(NamedTuple):
    """What the backward pass needs of a block's queries besides."""

    dout: Array  # [B, S, K, G, D]
    delta: Array  # [B, S, K, G]
    lse: Array  # [B, S, K, G]


@partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8))
def attention(
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array | None,
    kv_segment_ids: Array | None,
    query_offset: Array,
    causal: bool,
    scale: float,
    block: int,
) -> Array:
    """``api.attention`` without its checks; query_offset is [B] or [1], block divides the queries into pieces."""
    return _forward(q, k, v, segment_ids, kv_segment_ids, query_offset, causal, scale, block)[0]


def _forward(q, k, v, segment_ids, kv_segment_ids, query_offset, causal, scale, block):
    queries = _queries(q, k, segment_ids, query_offset)

    def attend(carry: None, piece: _Queries) -> tuple[None, tuple[Array, Array]]:
        logits = _logits(piece, k, kv_segment_ids, causal, scale)
        maximum = jnp.max(logits, axis=-1, keepdims=True)
        maximum = jnp.where(maximum == -jnp.inf, 0.0, maximum)
        weights = jnp.exp(logits - maximum)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        total = jnp.where(total == 0.0, 1.0, total)
        out = _dot("bkgst,btkd->bskgd", (weights / total).astype(v.dtype), v)
        lse = (maximum + jnp.log(total))[..., 0]  # 0 for a query that sees no key
        return carry, (out.astype(q.dtype), lse.transpose(0, 3, 1, 2))

    _, (out, lse) = _scan(attend, None, queries, block)
    out, lse = out.reshape(q.shape), lse.reshape(q.shape[:3]).transpose(0, 2, 1)  # [B, H, S]
    out = checkpoint_name(out, SAVEABLE_NAMES[0])
    lse = checkpoint_name(lse, SAVEABLE_NAMES[1])
    return out, (q, k, v, segment_ids, kv_segment_ids, query_offset, out, lse)


def _backward(causal, scale, block, residuals, dout):
    q, k, v, segment_ids, kv_segment_ids, query_offset, out, lse = residuals
    queries = _queries(q, k, segment_ids, query_offset)
    heads = queries.q.shape[:-1]
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1).reshape(heads)
    gradients = _Gradients(dout.reshape(queries.q.shape), delta, lse.transpose(0, 2, 1).reshape(heads))

    def attend(carry: tuple[Array, Array], piece: tuple[_Queries, _Gradients]) -> tuple[tuple[Array, Array], Array]:
        (dk, dv), (piece_q, piece_g) = carry, piece
        logits = _logits(piece_q, k, kv_segment_ids, causal, scale)
        probabilities = jnp.exp(logits - _rows(piece_g.lse))
        dv = dv + _dot("bkgst,bskgd->btkd", probabilities.astype(v.dtype), piece_g.dout)
        dprobabilities = _dot("bskgd,btkd->bkgst", piece_g.dout, v)
        dlogits = (probabilities * (dprobabilities - _rows(piece_g.delta)) * scale).astype(q.dtype)
        dk = dk + _dot("bkgst,bskgd->btkd", dlogits, piece_q.q)
        return (dk, dv), _dot("bkgst,btkd->bskgd", dlogits, k).astype(q.dtype)

    zeros = jnp.zeros_like(k, dtype=jnp.float32), jnp.zeros_like(v, dtype=jnp.float32)
    (dk, dv), dq = _scan(attend, zeros, (queries, gradients), block)
    return dq.reshape(q.shape), dk.astype(k.dtype), dv.astype(v.dtype), None, None, None


attention.defvjp(_forward, _backward)


def _queries(q: Array, k: Array, segment_ids: Array | None, query_offset: Array) -> _Queries:
    batch, length, heads, size = q.shape
    grouped = q.reshape(batch, length, k.shape[2], heads // k.shape[2], size)
    positions = jnp.arange(length, dtype=jnp.int32)[None, :] + query_offset[:, None]
    return _Queries(grouped, positions, segment_ids)


def _logits(queries: _Queries, k: Array, kv_segment_ids: Array | None, causal: bool, scale: float) -> Array:
    """Scaled float32 logits [B, K, G, S, T] of a block; −inf where the query does not see the key."""
    logits = _dot("bskgd,btkd->bkgst", queries.q, k) * scale
    mask = visible(queries.positions, k.shape[1], queries.segment_ids, kv_segment_ids, causal=causal)
    return logits if mask is None else jnp.where(mask[:, None, None], logits, -jnp.inf)


def _dot(spec: str, left: Array, right: Array) -> Array:
    """A product of inputs of one dtype, accumulated in float32."""
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else lax.Precision.DEFAULT
    return jnp.einsum(spec, left, right, precision=precision, preferred_element_type=jnp.float32)


def _rows(statistics: Array) -> Array:
    """[B, S, K, G] numbers of the queries as [B, K, G, S, 1]."""
    return statistics.transpose(0, 2, 3, 1)[..., None]


def _scan(step, carry, queries, block: int):
    """Scan ``step`` over blocks of the query axis (1) of every leaf; the results are joined along it again."""
    length = jax.tree.leaves(queries)[0].shape[1]
    if block >= length:
        return step(carry, queries)
    missing = -length % block

    def cut(leaf: Array) -> Array:  # padding queries belong to document 0 and have no gradient
        leaf = jnp.pad(leaf, ((0, 0), (0, missing)) + ((0, 0),) * (leaf.ndim - 2))
        return jnp.moveaxis(leaf.reshape(leaf.shape[0], -1, block, *leaf.shape[2:]), 1, 0)

    def join(leaf: Array) -> Array:
        leaf = jnp.moveaxis(leaf, 0, 1)
        return leaf.reshape(leaf.shape[0], -1, *leaf.shape[3:])[:, :length]

    carry, results = lax.scan(step, carry, jax.tree.map(cut, queries))
    return carry, jax.tree.map(join, results)
