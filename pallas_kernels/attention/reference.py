"""Attention in plain jax.numpy, all logits at once: the oracle.

float64 inputs are computed in float64, all others in float32.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.mask import visible


def attention(
    q: Float[Array, "B S H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    *,
    segment_ids: Int[Array, "B S"] | None = None,
    kv_segment_ids: Int[Array, "B T"] | None = None,
    causal: bool = True,
    query_offset: int | Int[Array, "#B"] = 0,
    scale: float | None = None,
) -> Float[Array, "B S H D"]:
    """softmax(scale · q kᵀ + mask) v in q's dtype; arguments as in ``api.attention``."""
    batch, length, heads, size = q.shape
    keys, kv_heads = k.shape[1:3]
    wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    grouped = q.reshape(batch, length, kv_heads, heads // kv_heads, size).astype(wide)
    logits = jnp.einsum("bskgd,btkd->bkgst", grouped, k.astype(wide), precision=lax.Precision.HIGHEST)
    logits = logits * (size**-0.5 if scale is None else scale)
    positions = jnp.arange(length, dtype=jnp.int32)[None, :] + jnp.asarray(query_offset, jnp.int32).reshape(-1, 1)
    kv_segment_ids = segment_ids if kv_segment_ids is None else kv_segment_ids
    mask = visible(positions, keys, segment_ids, kv_segment_ids, causal=causal)
    if mask is not None:
        logits = jnp.where(mask[:, None, None], logits, -jnp.inf)
    maximum = lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    weights = jnp.exp(logits - jnp.where(jnp.isfinite(maximum), maximum, 0.0))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    probabilities = weights / jnp.where(total == 0.0, 1.0, total)  # a query that sees no key: zeros
    out = jnp.einsum("bkgst,btkd->bskgd", probabilities, v.astype(wide), precision=lax.Precision.HIGHEST)
    return out.reshape(q.shape).astype(q.dtype)
