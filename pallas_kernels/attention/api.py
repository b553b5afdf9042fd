"""Scaled dot-product attention: the public function.

Grouped-query heads, causality, packed documents, padding and a key-value cache in one function. The implementations:

- ``cudnn``: NVIDIA GPUs of compute capability 8.0 or more, bfloat16 and float16, training and prefill.
- ``xla``: everything else; decoding, float32, CPU, older cards.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.attention import config, cudnn, xla


def attention(
    q: Float[Array, "B S H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    *,
    segment_ids: Int[Array, "B S"] | None = None,
    kv_segment_ids: Int[Array, "B T"] | None = None,
    causal: bool = True,
    query_offset: int | Int[Array, "#B"] | Int[Array, ""] = 0,
    scale: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "B S H D"]:
    """softmax(scale · q kᵀ) v over the keys that each query may see.

    Query head h uses key head h // (H / K). Logits, softmax and sums are float32 for any input dtype; float32 inputs
    are multiplied in float32. A query that sees no key gives zeros and passes no gradient back. The backward pass
    keeps, besides its inputs, the output and one float32 number a query and head, under the names ``SAVEABLE_NAMES``
    for checkpoint policies.

    Args:
        q: queries.
        k: keys, of q's dtype; K divides H.
        v: values, of q's dtype.
        segment_ids: the document of each query, counted from 1, int32; 0 marks padding, which sees nothing and is not
            seen. None where the row is one document.
        kv_segment_ids: the document of each key, likewise; segment_ids by default, where there are as many keys.
        causal: key t is visible to query s only if t <= s + query_offset.
        query_offset: the position of the first query among the keys: a number for all rows or one for each. Not 0 with
            a cache.
        scale: what the logits are multiplied with, 1/√D by default.
        implementation: None, "cudnn" or "xla".

    Returns:
        The weighted values in q's dtype. Differentiable in q, k and v.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
        NotImplementedError: the implementation that was asked for cannot serve this call; the message says why.
    """
    batch, length, heads, size = q.shape
    if k.shape != v.shape or k.ndim != 4 or k.shape[0] != batch or k.shape[3] != size or heads % k.shape[2]:
        raise ValueError(
            "attention: k and v must both be [batch, keys, key heads, head size] with q's batch and head size and a "
            f"number of heads that divides q's, got q {q.shape}, k {k.shape}, v {v.shape}"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"attention: q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
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
    segments = segment_ids is not None
    scale = size**-0.5 if scale is None else scale
    reason = cudnn.unsupported(dispatch.target(), q, k, segments=segments, causal=causal, query_offset=query_offset)
    chosen = dispatch.select("attention", implementation, [("cudnn", reason), ("xla", None)])
    if chosen == "cudnn":
        return cudnn.attention(q, k, v, segment_ids, kv_segment_ids, causal, scale)
    offset = jnp.asarray(query_offset, jnp.int32).reshape(-1)
    if offset.size not in (1, batch):
        raise ValueError(f"attention: query_offset must be one number or one a row ({batch}), got {offset.size}")
    block = config.query_block(batch, heads, length, k.shape[1])
    return xla.attention(q, k, v, segment_ids, kv_segment_ids, offset, causal, scale, block)
