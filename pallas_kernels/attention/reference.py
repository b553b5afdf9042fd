"""Attention in plain jax.numpy, all logits at once: the oracle.

float64 inputs are computed in float64, all others in float32. Gradients are jax's own.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from pallas_kernels.attention import dropout
from pallas_kernels.attention.call import Mask, Options
from pallas_kernels.attention.mask import queries_of, visible
from pallas_kernels.attention.ranges import SegmentRanges


def attention(
    q: Float[Array, "B S H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K Dv"],
    *,
    segment_ids: Int[Array, "B S"] | None = None,
    kv_segment_ids: Int[Array, "B T"] | None = None,
    segment_ranges: SegmentRanges | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: Float[Array, " H"] | None = None,
    query_offset: int | Int[Array, "#B"] | None = None,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: PRNGKeyArray | None = None,
    kept: Bool[Array, "B H S T"] | None = None,
    return_lse: bool = False,
):
    """softmax(scale · q kᵀ + mask) v in q's dtype; arguments as in ``api.attention``.

    ``kept`` is dropout's mask itself, instead of ``dropout_key``.
    """
    batch, length, heads, size = q.shape
    keys, kv_heads = k.shape[1:3]
    wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    options = Options(size**-0.5 if scale is None else scale, causal, sliding_window, logits_soft_cap, dropout_rate)
    offset = jnp.asarray(keys - length if query_offset is None else query_offset, jnp.int32).reshape(-1)
    mask = Mask(segment_ranges, segment_ids, segment_ids if kv_segment_ids is None else kv_segment_ids, offset)

    k, v = (jnp.repeat(array, heads // kv_heads, axis=2).astype(wide) for array in (k, v))
    logits = jnp.einsum("bshd,bthd->bhst", q.astype(wide), k, precision=lax.Precision.HIGHEST) * options.scale
    if logits_soft_cap is not None:
        logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
    allowed = visible(queries_of(mask, length), mask, keys, options)
    if allowed is not None:
        logits = jnp.where(allowed[:, None], logits, -jnp.inf)
    if sinks is not None:  # a key that every query sees and that has no value
        column = jnp.broadcast_to(sinks.astype(wide)[None, :, None, None], (batch, heads, length, 1))
        logits = jnp.concatenate([logits, column], axis=-1)

    maximum = lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    maximum = jnp.where(maximum == -jnp.inf, 0.0, maximum)
    weights = jnp.exp(logits - maximum)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    nothing = total == 0.0
    total = jnp.where(nothing, 1.0, total)
    probabilities = (weights / total)[..., :keys]  # zeros for a query that sees no key
    if dropout_rate > 0.0:
        kept = kept_weights(dropout_key, dropout_rate, (batch, heads, length, keys)) if kept is None else kept
        probabilities = jnp.where(kept, probabilities / (1.0 - dropout_rate), 0.0)
    out = jnp.einsum("bhst,bthd->bshd", probabilities, v, precision=lax.Precision.HIGHEST).astype(q.dtype)
    if not return_lse:
        return out
    return out, jnp.where(nothing, -jnp.inf, maximum + jnp.log(total))[..., 0]


def kept_weights(key: PRNGKeyArray | None, rate: float, shape: tuple[int, int, int, int]) -> Bool[Array, "B H S T"]:
    """Dropout's mask.

    Args:
        key: the call's dropout key.
        rate: probability that a weight is dropped.
        shape: (B, H, S, T).
    """
    assert key is not None, "dropout needs a key"
    batch, heads, length, keys = shape
    seed = jax.random.bits(key, (2,), jnp.uint32)
    bits = dropout.random_bits(
        (seed[0], seed[1]),
        jnp.arange(batch * heads, dtype=jnp.uint32).reshape(batch, heads, 1, 1),
        jnp.arange(length, dtype=jnp.uint32).reshape(1, 1, length, 1),
        jnp.arange(keys, dtype=jnp.uint32).reshape(1, 1, 1, keys),
    )
    return bits >= jnp.uint32(dropout.threshold(rate))
