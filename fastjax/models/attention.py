"""Self-attention of one layer."""

import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PRNGKeyArray

from convert.model.config import Layer, ModelConfig
from fastjax.models.norms import Norm
from fastjax.models.projection import Projection
from fastjax.parallel import BATCH, batch_part, local
from pallas_kernels.attention import SegmentRanges, attention, segment_ranges
from pallas_kernels.rope import rope

#: Attention's part of a layer's key, whose other parts are the adapters' (`fastjax.lora.dropout`).
_OWN_KEY = zlib.crc32(b"self_attn") & 0x7FFFFFFF


class Context(NamedTuple):
    """What all layers share: made once a batch.

    Attributes:
        rotary: cosines and sines of the rotary angles, float32 [B, S, R/2] for the R features of a head that turn, by
            the name of the field of `ModelConfig` that they come from.
        segment_ranges: where the documents of the rows lie; None where every row is one document, and with a cache.
        key: dropout key of the step; None outside training.
        segment_ids: with a cache, int32 [B, S]: 1, or 0 for padding.
        cache_index: with a cache, the slot of the first of the S tokens; int32 [].
        cache_segment_ids: with a cache, int32 [B, T]: which slots hold tokens (this step's included).
    """

    rotary: dict[str, tuple[Float[Array, "B S R/2"], Float[Array, "B S R/2"]]]
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
    """Grouped-query attention.

    Attributes:
        shape: query heads, key heads, head size.
        layer: what is the layer's own: its window, and its rotary positions.
        interleaved: whether a rotary pair is two neighbours.
        whole: whether `q_norm` and `k_norm` are over all heads together.
        scale: what the products of queries and keys are multiplied with.
        soft_cap: then they become cap · tanh(product / cap); None: they stay.
        dropout: probability with which a weight is dropped after the softmax in training.
        qkv: projections to queries, keys and values, or one to all three in this order.
        o: projection of what the heads give.
        q_norm: normalisation of the queries before they turn, over heads or over all of them; None: none.
        k_norm: likewise of the keys.
        float32: whether all of it is computed in float32, whatever the input's dtype.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: Layer,
        qkv: Projection,
        o: Projection,
        norms: tuple[Norm, Norm] | None,
        float32: bool = False,
    ):
        self.shape = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        self.layer, self.interleaved, self.whole = layer, config.rope_interleaved, config.qk_norm == "projection"
        self.scale, self.soft_cap = config.attention_multiplier, config.attn_logit_softcapping
        self.dropout, self.float32 = config.attention_dropout, float32
        self.qkv, self.o = qkv, o
        self.q_norm, self.k_norm = (None, None) if norms is None else norms

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
        parts = self.qkv(x, key)
        if len(parts) == 1:
            parts = jnp.split(parts[0], [heads * size, (heads + key_heads) * size], axis=-1)
        q, k = self._heads(parts[0], self.q_norm, context), self._heads(parts[1], self.k_norm, context)
        v = parts[2].reshape(batch, length, key_heads, size)
        if cache is None:
            out = self._attend(q, k, v, context.segment_ranges, key)
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
                **self._options(),
            )
        (out,) = self.o(out.reshape(batch, length, heads * size), key)
        return out.astype(dtype), cache

    def _heads(self, x: Float[Array, "B S N"], norm: Norm | None, context: Context) -> Float[Array, "B S H D"]:
        """Queries or keys by head: normalised and turned."""
        batch, length, size = *x.shape[:2], self.shape[2]
        if norm is not None and self.whole:
            x = norm(x)
        x = x.reshape(batch, length, -1, size)
        if norm is not None and not self.whole:
            x = norm(x)
        if self.layer.rope is None:
            return x
        cos, sin = context.rotary[self.layer.rope]
        turning = 2 * cos.shape[-1]
        turned, rest = x[..., :turning], x[..., turning:]
        if self.interleaved:  # into halves: queries and keys alike, so that their products stay what they are
            turned = turned.reshape(*x.shape[:3], turning // 2, 2).swapaxes(-1, -2).reshape(turned.shape)
        turned = rope(turned, cos, sin)
        return turned if turning == size else jnp.concatenate([turned, rest], axis=-1)

    def _attend(self, q, k, v, ranges: SegmentRanges | None, key: PRNGKeyArray | None):
        """Causal attention of whole rows, on each device's own rows."""
        dropped = None if key is None or self.dropout == 0.0 else jax.random.fold_in(key, _OWN_KEY)

        def own(q, k, v, ranges, key):
            options = self._options()
            if key is not None:
                row = batch_part() * q.shape[0]
                options |= {"dropout_rate": self.dropout, "dropout_key": key, "dropout_row": row}
            return attention(q, k, v, segment_ranges=ranges, **options)

        rows = P(BATCH)
        return local(own, in_specs=(*(rows,) * 4, P()), out_specs=rows)(q, k, v, ranges, dropped)

    def _options(self) -> dict[str, Any]:
        return {
            "sliding_window": self.layer.sliding_window,
            "logits_soft_cap": self.soft_cap,
            "scale": self.scale,
        }


def document_ranges(segment_ids: Int[Array, "B S"]) -> SegmentRanges:
    """Where the documents of the rows lie, for `Context`; made on each device of its own rows.

    Args:
        segment_ids: document of each token, never decreasing along the row but for padding, which is 0.
    """
    return local(segment_ranges, in_specs=(P(BATCH),), out_specs=P(BATCH))(segment_ids)
