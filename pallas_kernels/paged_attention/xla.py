"""Attention to pages in jax.numpy: some pages of every row at a time, as many times as the longest row needs."""

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

#: Tokens of a row that are gathered at a time, at most.
_TILE = 64
_LOWEST = -1e30


def forward(q, keys, values, table, lengths, layer, sinks, options) -> Array:
    """As `api.REGISTRY` has it."""
    rows, heads, size = q.shape
    kv_heads, page = keys.shape[2:4]
    value_size = values if isinstance(values, int) else values.shape[4]
    block = min(max(1, _TILE // page), table.shape[1])
    tile = block * page
    layer = jnp.asarray(layer, jnp.int32)
    # Entries that no token needs may be any number: they read page 0, and their tokens are not seen.
    needed = jnp.arange(table.shape[1])[None] * page < lengths[:, None]
    table = jnp.pad(jnp.where(needed, table, 0), ((0, 0), (0, -table.shape[1] % block)))
    q = q.reshape(rows, kv_heads, heads // kv_heads, size)
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    start = jnp.zeros_like(lengths)
    if options.sliding_window is not None:
        start = jnp.maximum(lengths - options.sliding_window, 0)

    def body(number, carry):
        out, maximum, total = carry
        here = lax.dynamic_slice_in_dim(table, number * block, block, axis=1)

        def taken(pages):
            return jnp.moveaxis(pages[layer, here].astype(q.dtype), 2, 1).reshape(rows, kv_heads, tile, -1)

        k = taken(keys)
        v = k[..., :value_size] if isinstance(values, int) else taken(values)
        logits = jnp.einsum("rkgd,rktd->rkgt", q, k, precision=precision, preferred_element_type=jnp.float32)
        logits = logits * options.scale
        if options.logits_soft_cap is not None:
            logits = options.logits_soft_cap * jnp.tanh(logits / options.logits_soft_cap)
        token = number * tile + jnp.arange(tile)[None]
        seen = (token < lengths[:, None]) & (token >= start[:, None])
        logits = jnp.where(seen[:, None, None], logits, -jnp.inf)
        higher = jnp.maximum(maximum, jnp.max(logits, axis=-1))
        weights, correction = jnp.exp(logits - higher[..., None]), jnp.exp(maximum - higher)
        v = jnp.where(seen[:, None, :, None], v, 0)  # a value that no weight takes may be anything, NaN too
        added = jnp.einsum(
            "rkgt,rktd->rkgd", weights.astype(v.dtype), v, precision=precision, preferred_element_type=jnp.float32
        )
        return out * correction[..., None] + added, higher, total * correction + jnp.sum(weights, axis=-1)

    shape = q.shape[:3]
    maximum, total = jnp.full(shape, _LOWEST, jnp.float32), jnp.zeros(shape, jnp.float32)
    if sinks is not None:  # a first token of value 0
        maximum = jnp.broadcast_to(jnp.maximum(sinks.astype(jnp.float32), _LOWEST).reshape(1, *shape[1:]), shape)
        total = jnp.ones(shape, jnp.float32)
    first, last = jnp.min(start) // tile, pl.cdiv(jnp.max(lengths), tile)
    carry = (jnp.zeros((*shape, value_size), jnp.float32), maximum, total)
    out, _, total = lax.fori_loop(first, last, body, carry)
    out = jnp.where((lengths > 0)[:, None, None, None], out / jnp.where(total == 0.0, 1.0, total)[..., None], 0.0)
    return out.reshape(rows, heads, value_size).astype(q.dtype)
