"""Attention for XLA, block of queries by block of queries, with FlashAttention's backward pass (arXiv 2307.08691).

The backward pass computes the weights again from each query's log-sum-exp, so memory stays linear in the sequence: at
most one block of float32 logits lives at a time. With logits L = cap · tanh(scale · q kᵀ / cap) (or scale · q kᵀ),
P = exp(L − lse), Z the kept weights' factor of dropout (0 or 1 / (1 − rate), else 1) and δ = rowsum(dout ∘ out) − dlse:

    dv = (Z ∘ P)ᵀ dout      dL = P ∘ (Z ∘ dout vᵀ − δ)      dS = dL ∘ (1 − (L / cap)²)
    dq = scale · dS k       dk = scale · dSᵀ q

Products of 16-bit inputs are accumulated in float32, and the operands of the next product are rounded to the inputs'
dtype first. float32 inputs use float32 products (precision "highest"). Key heads are shared by reshaping q, never by
repeating k and v. A query that sees no key gives zeros and passes no gradient: its lse is +inf, or that of the sink.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.attention import dropout
from pallas_kernels.attention.call import Cotangents, Mask, Operands, Options
from pallas_kernels.attention.config import query_block
from pallas_kernels.attention.mask import Queries, queries_of, visible


class _Block(NamedTuple):
    """Queries and their places, cut into blocks along S; K key heads of G query heads each."""

    q: Array  # [B, S, K, G, D]
    places: Queries


class _Gradients(NamedTuple):
    """A block's operands of the backward pass beside its queries."""

    dout: Array  # [B, S, K, G, Dv]
    delta: Array  # [B, S, K, G]
    lse: Array  # [B, S, K, G]


def forward(operands: Operands, options: Options, block: int | None = None) -> tuple[Array, Array]:
    """The output [B, S, H, Dv] in q's dtype and the log-sum-exp of each query's logits [B, H, S] in float32.

    Args:
        operands: of the call.
        options: the call's.
        block: queries at once; by default `config.query_block`.
    """
    q, k, v, mask, sinks, seed = operands
    batch, length, heads, _ = q.shape

    def attend(carry: None, piece: _Block) -> tuple[None, tuple[Array, Array]]:
        capped, allowed = _logits(piece, k, mask, options)
        logits = capped if allowed is None else jnp.where(allowed, capped, -jnp.inf)
        maximum = jnp.max(logits, axis=-1, keepdims=True)  # [B, K, G, S, 1]
        if sinks is not None:
            sink = sinks.astype(jnp.float32).reshape(1, *maximum.shape[1:3], 1, 1)
            maximum = jnp.maximum(maximum, sink)
        maximum = jnp.where(maximum == -jnp.inf, 0.0, maximum)
        weights = jnp.exp(logits - maximum)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        if sinks is not None:
            total = total + jnp.exp(sink - maximum)
        nothing = total == 0.0
        total = jnp.where(nothing, 1.0, total)
        weights = weights / total
        if seed is not None:
            weights = weights * _kept(piece, k.shape[1], seed, options)
        out = _dot("bkgst,btkd->bskgd", weights.astype(v.dtype), v)
        lse = jnp.where(nothing, jnp.inf, maximum + jnp.log(total))[..., 0]
        return carry, (out.astype(q.dtype), lse.transpose(0, 3, 1, 2))

    _, (out, lse) = _scan(attend, None, _cut(q, k, mask), _queries_at_once(q, k, block))
    return out.reshape(batch, length, heads, v.shape[3]), lse.reshape(batch, length, heads).transpose(0, 2, 1)


def backward(
    operands: Operands, cotangents: Cotangents, options: Options, block: int | None = None
) -> tuple[Array, Array, Array]:
    """The gradients of q, k and v in their dtypes.

    Args:
        operands: of the forward pass.
        cotangents: of its results.
        options: the call's.
        block: queries at once; by default `config.query_block`.
    """
    q, k, v, mask, _, seed = operands
    lse, delta, dout, _ = cotangents
    queries = _cut(q, k, mask)
    heads = queries.q.shape[:-1]
    rows = [statistics.transpose(0, 2, 1).reshape(heads) for statistics in (delta, lse)]
    gradients = _Gradients(dout.reshape(*heads, -1), *rows)

    def attend(carry: tuple[Array, Array], piece: tuple[_Block, _Gradients]) -> tuple[tuple[Array, Array], Array]:
        (dk, dv), (piece_q, piece_g) = carry, piece
        capped, allowed = _logits(piece_q, k, mask, options)
        weights = jnp.exp(capped - _rows(piece_g.lse))
        weights = weights if allowed is None else jnp.where(allowed, weights, 0.0)
        dweights = _dot("bskgd,btkd->bkgst", piece_g.dout, v)
        kept = weights
        if seed is not None:
            factor = _kept(piece_q, k.shape[1], seed, options)
            kept, dweights = weights * factor, dweights * factor
        dv = dv + _dot("bkgst,bskgd->btkd", kept.astype(v.dtype), piece_g.dout)
        dlogits = weights * (dweights - _rows(piece_g.delta))
        if options.logits_soft_cap is not None:
            dlogits = dlogits * (1.0 - jnp.square(capped / options.logits_soft_cap))
        dlogits = (dlogits * options.scale).astype(q.dtype)
        dk = dk + _dot("bkgst,bskgd->btkd", dlogits, piece_q.q)
        return (dk, dv), _dot("bkgst,btkd->bskgd", dlogits, k).astype(q.dtype)

    zeros = jnp.zeros_like(k, dtype=jnp.float32), jnp.zeros_like(v, dtype=jnp.float32)
    (dk, dv), dq = _scan(attend, zeros, (queries, gradients), _queries_at_once(q, k, block))
    return dq.reshape(q.shape), dk.astype(k.dtype), dv.astype(v.dtype)


def _queries_at_once(q: Array, k: Array, block: int | None) -> int:
    batch, length, heads, _ = q.shape
    return query_block(batch, heads, length, k.shape[1]) if block is None else block


def _cut(q: Array, k: Array, mask: Mask) -> _Block:
    batch, length, heads, size = q.shape
    grouped = q.reshape(batch, length, k.shape[2], heads // k.shape[2], size)
    return _Block(grouped, queries_of(mask, length))


def _logits(piece: _Block, k: Array, mask: Mask, options: Options) -> tuple[Array, Array | None]:
    """Scaled, capped float32 logits [B, K, G, S, T] of a block, and the mask [B, 1, 1, S, T]."""
    logits = _dot("bskgd,btkd->bkgst", piece.q, k) * options.scale
    if options.logits_soft_cap is not None:
        logits = options.logits_soft_cap * jnp.tanh(logits / options.logits_soft_cap)
    allowed = visible(piece.places, mask, k.shape[1], options)
    return logits, None if allowed is None else allowed[:, None, None]


def _kept(piece: _Block, keys: int, seed: Array, options: Options) -> Array:
    """Dropout's factors of the weights [B, K, G, S, T]: 0 or 1 / (1 − rate)."""
    batch, _, kv_heads, group, _ = piece.q.shape
    heads = jnp.arange(batch * kv_heads * group, dtype=jnp.uint32).reshape(batch, kv_heads, group, 1, 1)
    queries = piece.places.index[0].astype(jnp.uint32).reshape(1, 1, 1, -1, 1)
    bits = dropout.random_bits(
        (seed[0], seed[1]), heads, queries, jnp.arange(keys, dtype=jnp.uint32).reshape(1, 1, 1, 1, keys)
    )
    kept = bits >= jnp.uint32(dropout.threshold(options.dropout_rate))
    return jnp.where(kept, jnp.float32(1.0 / (1.0 - options.dropout_rate)), jnp.float32(0.0))


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

    def cut(leaf: Array) -> Array:  # queries that fill up the last block are zeros and have no gradient
        leaf = jnp.pad(leaf, ((0, 0), (0, missing)) + ((0, 0),) * (leaf.ndim - 2))
        return jnp.moveaxis(leaf.reshape(leaf.shape[0], -1, block, *leaf.shape[2:]), 1, 0)

    def join(leaf: Array) -> Array:
        leaf = jnp.moveaxis(leaf, 0, 1)
        return leaf.reshape(leaf.shape[0], -1, *leaf.shape[3:])[:, :length]

    carry, results = lax.scan(step, carry, jax.tree.map(cut, queries))
    return carry, jax.tree.map(join, results)
