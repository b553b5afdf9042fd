"""Self-attention of one layer."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fastjax.models.config import ModelConfig
from fastjax.models.projection import Projection
from fastjax.parallel import BATCH, local
from pallas_kernels.attention import SegmentRanges, attention, segment_ranges
from pallas_kernels.rope import rope


class Context(NamedTuple):
    """What all layers share: made once a batch.

    Attributes:
        cos, sin: rotary tables, float32 [B, S, D/2].
        segment_ranges: where the documents of the rows lie; None where every row is one document, and with a cache.
        key: dropout key of the step; None outside training.
        segment_ids: with a cache, int32 [B, S]: 1, or 0 for padding.
        cache_index: with a cache, the slot of the first of the S tokens; int32 [].
        cache_segment_ids: with a cache, int32 [B, T]: which slots hold tokens (this step's included).
    """

    cos: Float[Array, "B S D/2"]
    sin: Float[Array, "B S D/2"]
    segment_ranges: SegmentRanges | None
    key: PRNGKeyArray | None
    segment_ids: Int[Array, "B S"] | None = None
    cache_index: Int[Array, ""] | None = None
    cache_segment_ids: Int[Array, "B T"] | None = None


class LayerCache(NamedTuple):
    """Keys and values of one layer's past tokens, [B, T, K, D]."""

    keys: Float[Array, "B T K D"]
    values: Float[Array, "B T K D"]


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions.

    Attributes:
        shape: query heads, key heads, head size.
        qkv: projections to queries, keys and values.
        o: projection of what the heads give.
        float32: whether all of it is computed in float32, whatever the input's dtype.
    """

    def __init__(self, config: ModelConfig, qkv: Projection, o: Projection, float32: bool = False):
        self.shape = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        self.float32 = float32
        self.qkv, self.o = qkv, o

    def __call__(
        self,
        x: Float[Array, "B S E"],
        context: Context,
        key: PRNGKeyArray | None,
        cache: LayerCache | None,
    ) -> tuple[Float[Array, "B S E"], LayerCache | None]:
        """Attention of normalised inputs; with a cache, over the cached tokens too, which then include these."""
        heads, key_heads, size = self.shape
        batch, length = x.shape[:2]
        dtype = x.dtype
        x = x.astype(jnp.float32) if self.float32 else x
        q, k, v = self.qkv(x, key)
        q = rope(q.reshape(batch, length, heads, size), context.cos, context.sin)
        k = rope(k.reshape(batch, length, key_heads, size), context.cos, context.sin)
        v = v.reshape(batch, length, key_heads, size)
        if cache is None:
            out = _attend(q, k, v, context.segment_ranges)
        else:
            assert context.cache_index is not None, "a cache needs the slot that its new tokens go to"
            start = (0, context.cache_index, 0, 0)
            cache = LayerCache(
                jax.lax.dynamic_update_slice(cache.keys, k.astype(cache.keys.dtype), start),
                jax.lax.dynamic_update_slice(cache.values, v.astype(cache.values.dtype), start),
            )
            out = attention(
                q,
                cache.keys.astype(q.dtype),
                cache.values.astype(q.dtype),
                segment_ids=context.segment_ids,
                kv_segment_ids=context.cache_segment_ids,
                query_offset=context.cache_index,
            )
        (out,) = self.o(out.reshape(batch, length, heads * size), key)
        return out.astype(dtype), cache


def document_ranges(segment_ids: Int[Array, "B S"]) -> SegmentRanges:
    """Where the documents of the rows lie, for `Context`; made on each device of its own rows.

    Args:
        segment_ids: document of each token, never decreasing along the row but for padding, which is 0.
    """
    return local(segment_ranges, in_specs=(P(BATCH),), out_specs=P(BATCH))(segment_ids)


def _attend(q, k, v, ranges: SegmentRanges | None):
    """Causal attention of whole rows, on each device's own rows."""
    rows = P(BATCH)
    if ranges is None:
        return local(attention, in_specs=(rows, rows, rows), out_specs=rows)(q, k, v)
    island = local(
        lambda q, k, v, ranges: attention(q, k, v, segment_ranges=ranges), in_specs=(rows,) * 4, out_specs=rows
    )
    return island(q, k, v, ranges)
