"""Self-attention of one layer."""

import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from convert.model.config import Layer, ModelConfig
from fastjax.lora import heads as heads_unit
from fastjax.lora.linear import describe, matrices_of
from fastjax.lora.norm import Made
from fastjax.lora.params import BaseParam
from fastjax.models.norms import Norm
from fastjax.models.projection import Projection
from fastjax.parallel import BATCH, CONTEXT, ROWS, batch_part, context_devices, local
from fastjax.residuals import HEADS, name_residual
from pallas_kernels.attention import SegmentRanges, attention, ring_attention, segment_ranges
from pallas_kernels.rope import rope
from pallas_kernels.split_rope import split_rope

#: Attention's part of a layer's key, whose other parts are the adapters' (`fastjax.lora.dropout`).
_OWN_KEY = zlib.crc32(b"self_attn") & 0x7FFFFFFF


class Context(NamedTuple):
    """The inputs of all layers, made once a batch.

    Attributes:
        rotary: cosines and sines of the rotary angles, float32 [B, S, R/2] for the R features of a head that turn, by
            the name of the field of `ModelConfig` that they come from.
        segment_ranges: where the documents of the whole rows lie; None where every row is one document, and with a
            cache.
        key: dropout key of the step; None outside training.
        segment_ids: with a cache, int32 [B, S]: 1, or 0 for padding.
        cache_index: with a cache, the slot of the first of the S tokens; int32 [].
        cache_segment_ids: with a cache, int32 [B, T]: which slots hold tokens (this step's included).
        mask: which tokens are not padding, bool [B, S]; None: all. Attention does not read it.
        query_scales: factors of the turned queries, float32 [B, S], by the same names as `rotary`, where there are any.
        quantizing: whether fake quantisers are in force; None: they are.
    """

    rotary: dict[str, tuple[Float[Array, "B S R/2"], Float[Array, "B S R/2"]]]
    segment_ranges: SegmentRanges | None
    key: PRNGKeyArray | None
    segment_ids: Int[Array, "B S"] | None = None
    cache_index: Int[Array, ""] | None = None
    cache_segment_ids: Int[Array, "B T"] | None = None
    query_scales: Mapping[str, Float[Array, "B S"]] = {}
    mask: Bool[Array, "B S"] | None = None
    quantizing: Bool[Array, ""] | None = None


class LayerCache(NamedTuple):
    """Keys and values of one layer's past tokens, [B, T, K, D]."""

    keys: Float[Array, "B T K D"]
    values: Float[Array, "B T K D"]


class Sinks(nnx.Module):
    """A logit for each query head that joins the softmax's denominator and has no value (arXiv 2309.17453).

    Attributes:
        weight: [H].
    """

    def __init__(self, weight: Array):
        self.weight = BaseParam(weight)


class Attention(nnx.Module):
    """Grouped-query attention.

    Attributes:
        shape: query heads, key heads, head size.
        layer: the layer's window and rotary positions.
        turning: features of a head that turn; 0: none.
        interleaved: whether a rotary pair is two neighbours.
        whole: whether `q_norm` and `k_norm` are over all heads together.
        norm_last: whether they come after the rotary turn.
        scale: factor of the products of queries and keys.
        soft_cap: then they become cap · tanh(product / cap); None: they stay.
        dropout: probability of a dropped weight after the softmax in training.
        qkv: projections to queries, keys and values, or one to all three in this order.
        o: projection of the heads' output.
        q_norm: normalisation of the queries, of each head or of all together; None: none.
        k_norm: likewise of the keys.
        sinks: logits of no key; None: none.
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
        sinks: Sinks | None = None,
    ):
        self.shape = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        rope = None if layer.rope is None else getattr(config, layer.rope)
        self.turning = 0 if rope is None else rope.rotary_dim(config.head_dim)
        self.layer, self.interleaved, self.whole = layer, config.rope_interleaved, config.qk_norm == "projection"
        self.scale, self.soft_cap = config.attention_multiplier, config.attn_logit_softcapping
        self.dropout, self.float32, self.norm_last = config.attention_dropout, float32, config.qk_norm_after_rope
        assert not (self.norm_last and self.interleaved), "a scale a feature, and the turn reorders the features"
        self.qkv, self.o, self.sinks = qkv, o, sinks
        self.q_norm, self.k_norm = (None, None) if norms is None else norms

    @jax.named_scope("attention")
    def __call__(
        self,
        x: Float[Array, "B S E"],
        context: Context,
        key: PRNGKeyArray | None,
        cache: LayerCache | None,
        residual: Float[Array, "B S E"] | None = None,
        made: Made | None = None,
    ) -> tuple[Float[Array, "B S E"], LayerCache | None]:
        """Attention of normalised inputs; with a cache, over the cached tokens too, which then include these.

        Args:
            x: the inputs.
            context: of all layers.
            key: the layer's dropout key; None switches dropout off.
            cache: keys and values of past tokens, or None.
            residual: the residual stream, to which the attention's output is added; None: that is returned alone.
            made: where the way to the heads is one unit, what `lora.norm` has made of x.
        """
        batch, length = x.shape[:2]
        dtype = x.dtype
        x = x.astype(jnp.float32) if self.float32 else x
        q, k, v = (checkpoint_name(part, HEADS) for part in self._heads(x, context, key, made))
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
                sinks=self._sink_logits(),
                **self._options(),
            )
        out = out.reshape(batch, length, -1)
        if residual is None or set(self.o.dtypes(out.dtype)) == {residual.dtype}:
            (out,) = self.o(out, key, residual=residual)
            return out.astype(dtype), cache
        (out,) = self.o(out, key)
        return residual + out.astype(dtype), cache

    def why_not_fused(self, dtype: jnp.dtype) -> str | None:
        """The reason, a clause, that the way from input to turned heads is not one unit with its adapters; None: it is.

        Args:
            dtype: of the attention's input.
        """
        adapters = self.qkv.adapters.values()
        if not adapters:
            return "no adapter is in it"
        if self.qkv.quantizer is not None:
            return "its adapters are merged for a fake quantiser"
        if any(adapter.magnitude is not None for adapter in adapters):
            return "DoRA scales the projections' results"
        if self.qkv.bias is not None or self.q_norm is not None:
            return "a bias or a norm comes between projection and turn"
        if self.turning != self.shape[2] or self.interleaved:
            return "its heads do not turn whole, by pairs of their halves"
        if set(self.qkv.dtypes(dtype)) != {jnp.dtype(dtype)}:
            return "its projections are computed in another dtype"
        return None

    def _heads(
        self, x: Float[Array, "B S E"], context: Context, key: PRNGKeyArray | None, made: Made | None
    ) -> tuple[Float[Array, "B S H D"], Float[Array, "B S K D"], Float[Array, "B S K D"]]:
        """Queries, keys and values by head, ready for attention.

        Without normalisations they come out of one product in one pass, and are residuals in its place: the backward
        pass needs it no more. A normalisation needs its input there. Adapters are applied in the same pass where they
        can be, and what `lora.norm` makes of x may be given.
        """
        heads, key_heads, size = self.shape
        rotary = (None, None) if self.layer.rope is None else context.rotary[self.layer.rope]
        scales = context.query_scales.get(self.layer.rope or "")
        if rotary[0] is not None and rotary[1] is not None and self.why_not_fused(x.dtype) is None:
            weight, matrices = self.qkv.operand, matrices_of(self.qkv.adapters)
            parts = describe(self.qkv.parts, self.qkv.adapters)
            arrays = heads_unit.Arrays(weight, rotary[0], rotary[1], matrices, key, made)
            q, k, v = heads_unit.project_heads(parts, (heads, key_heads), x, arrays)
            return q if scales is None else q * scales.astype(q.dtype)[:, :, None, None], k, v
        assert made is None, "it is for the unit"
        whole = self.qkv.whole(x, key) if self.q_norm is None else None
        if whole is not None:
            options: dict[str, Any] = {"heads": heads, "key_heads": key_heads, "interleaved": self.interleaved}

            def own(product, cos, sin, scales):
                return split_rope(product, cos, sin, query_scales=scales, **options)

            island = local(own, in_specs=(ROWS,) * 4, out_specs=ROWS)
            q, k, v = (name_residual(part, "projection") for part in island(whole, *rotary, scales))
            return q, k, v
        parts = self.qkv(x, key)
        if len(parts) == 1:
            parts = jnp.split(parts[0], [heads * size, (heads + key_heads) * size], axis=-1)
        q, k = self._turned(parts[0], self.q_norm, *rotary), self._turned(parts[1], self.k_norm, *rotary)
        if scales is not None:
            q = q * scales.astype(q.dtype)[:, :, None, None]
        return q, k, parts[2].reshape(*x.shape[:2], key_heads, size)

    def _turned(
        self, x: Float[Array, "B S N"], norm: Norm | None, cos: Array | None, sin: Array | None
    ) -> Float[Array, "B S H D"]:
        """Queries or keys by head: normalised and turned, or the other way round."""
        batch, length, size = *x.shape[:2], self.shape[2]
        if norm is not None and self.whole and not self.norm_last:
            x = norm(x)
        x = x.reshape(batch, length, -1, size)
        if norm is not None and not self.whole and not self.norm_last:
            x = norm(x)
        if cos is not None and sin is not None:
            x = rope(x, cos, sin, interleaved=self.interleaved)
        if norm is not None and self.norm_last:
            x = norm(x.reshape(batch, length, -1)).reshape(x.shape) if self.whole else norm(x)
        return x

    def _attend(self, q, k, v, ranges: SegmentRanges | None, key: PRNGKeyArray | None):
        """Causal attention of whole rows, on each device's own rows, or on the tokens of them that it has."""
        dropped = None if key is None or self.dropout == 0.0 else jax.random.fold_in(key, _OWN_KEY)

        def own(q, k, v, ranges, key, sinks):
            options = self._options()
            if context_devices() > 1:
                return ring_attention(q, k, v, axis=CONTEXT, segment_ranges=ranges, sinks=sinks, **options)
            if key is not None:
                row = batch_part() * q.shape[0]
                options |= {"dropout_rate": self.dropout, "dropout_key": key, "dropout_row": row}
            return attention(q, k, v, segment_ranges=ranges, sinks=sinks, **options)

        island = local(own, in_specs=(*(ROWS,) * 3, P(BATCH), P(), P()), out_specs=ROWS)
        return island(q, k, v, ranges, dropped, self._sink_logits())

    def _sink_logits(self) -> Float[Array, " H"] | None:
        return None if self.sinks is None else self.sinks.weight[...].astype(jnp.float32)

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
