"""Softmax attention."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray

from convert.model import layers
from fastjax.lora import heads as heads_unit
from fastjax.lora.linear import describe, matrices_of
from fastjax.lora.norm import PreparedRows
from fastjax.lora.params import BaseParam
from fastjax.models.context import Context, Slots
from fastjax.models.layer_inputs import LayerInputs
from fastjax.models.mixers.keys_values import KeysValues, Rings, Seen, empty_keys_values
from fastjax.models.mixers.softmax import attend, project_output
from fastjax.models.norms import Norm
from fastjax.models.projection import Projection
from fastjax.parallel import ROWS, local
from fastjax.residuals import HEADS, name_residual
from pallas_kernels.attention import SegmentRanges, attention
from pallas_kernels.glu import glu
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.rope import rope
from pallas_kernels.split_rope import split_rope


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
        settings: its window and rotary positions.
        turning: features of a head that turn; 0: none.
        interleaved: whether a rotary pair is two neighbours.
        whole: whether `q_norm` and `k_norm` are over all heads together.
        norm_last: whether they come after the rotary turn.
        scale: factor of the products of queries and keys.
        limit: largest magnitude of the elements of queries, keys and values before the turn; None: there is none.
        soft_cap: then they become cap · tanh(product / cap); None: they stay.
        dropout: probability of a dropped weight after the softmax in training.
        gated: whether each head's output is multiplied by the sigmoid of a gate, which the queries' projection has
            behind each query.
        gate: projection to such gates; None: it is not gated, or as above.
        qkv: projections to queries, keys and values, or one to all three in this order.
        o: projection of the heads' output.
        q_norm: normalisation of the queries, of each head or of all together; None: none.
        k_norm: normalisation of the keys; None: none.
        sinks: logits of no key; None: none.
        float32: whether all of it is computed in float32, whatever the input's dtype.
        across: as in `Mixer`.
    """

    def __init__(self, settings: layers.Attention, inputs: LayerInputs):
        config, block = inputs.config, settings.block
        self.shape = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        rope = None if settings.rope is None else getattr(config, settings.rope)
        self.turning = 0 if rope is None else rope.rotary_dim(config.head_dim)
        self.settings, self.interleaved, self.whole = settings, config.rope_interleaved, config.qk_norm == "projection"
        self.scale, self.soft_cap = config.attention_multiplier, config.attn_logit_softcapping
        self.limit = config.clip_qkv
        self.dropout, self.norm_last = config.attention_dropout, config.qk_norm_after_rope
        assert not (self.norm_last and self.interleaved), "a scale a feature, and the turn reorders the features"
        self.gated = config.attention_gate == "queries"
        self.gate = inputs.projection(f"{block}.gate") if config.attention_gate == "projection" else None
        self.qkv, self.o = inputs.projection(f"{block}.qkv"), inputs.projection(f"{block}.o")
        self.sinks = Sinks(inputs.weights[block]["sinks"]["weight"]) if config.attention_sinks else None
        self.float32 = block in inputs.float32
        self.across: str | None = None
        self.q_norm = None if config.qk_norm is None else inputs.norm("q_norm", block)
        self.k_norm = None if config.qk_norm is None else inputs.norm("k_norm", block)

    @property
    def inner(self) -> tuple[Projection, ...]:
        """The projections of its input."""
        return (self.qkv,) if self.gate is None else (self.qkv, self.gate)

    @property
    def outer(self) -> tuple[Projection, ...]:
        """The projections to its output."""
        return (self.o,)

    def united(self, dtype: jnp.dtype) -> Projection | None:
        """The projection of its input that takes what `lora.norm` makes of it; None: there is none.

        Args:
            dtype: of the input.
        """
        return None if self.float32 or self.why_not_fused(dtype) is not None else self.qkv

    @jax.named_scope("attention")
    def __call__(
        self,
        x: Float[Array, "B S E"],
        context: Context,
        key: PRNGKeyArray | None,
        residual: Float[Array, "B S E"] | None = None,
        prepared: PreparedRows | None = None,
    ) -> Float[Array, "B S E"]:
        """The output for whole rows, as `Mixer.__call__`."""
        q, k, v, gate = self._heads(x, context, key, prepared)
        return self._out(self._attend(q, k, v, context.segment_ranges, key), gate, x.dtype, key, residual)

    def init(self, layers: int, batch: int, pages: tuple[int, int], dtype: jnp.dtype) -> KeysValues | Rings:
        """Keys and values of no token."""
        dtype = jnp.dtype(jnp.float32) if self.float32 else dtype
        return empty_keys_values(layers, batch, pages, self.shape[1:], self.settings.sliding_window, dtype)

    @jax.named_scope("attention")
    def step(
        self,
        x: Float[Array, "B S E"],
        state: KeysValues | Rings,
        context: Context,
        residual: Float[Array, "B S E"] | None = None,
        prepared: PreparedRows | None = None,
    ) -> tuple[Float[Array, "B S E"], KeysValues | Rings]:
        """The output for new tokens, as `Mixer.step`."""
        slots = context.slots
        assert slots is not None, "new tokens need their slots"
        q, k, v, gate = self._heads(x, context, None, prepared)
        if context.segment_ranges is not None:
            state = state.written(k, v, slots)
            out = self._attend(q, k, v, context.segment_ranges, None)
        elif x.shape[1] == 1:
            state = state.written(k, v, slots)
            out = self._attend_to_pages(q[:, 0], state, slots)[:, None]
        else:
            state, seen = state.seen(k, v, slots)
            out = self._attend_to_rows(q, seen, slots)
        return self._out(out, gate, x.dtype, None, residual), state

    def _attend_to_pages(
        self, q: Float[Array, "B H D"], state: KeysValues | Rings, slots: Slots
    ) -> Float[Array, "B H D"]:
        """Attention of one token a row."""
        keys, values, table = state.paged(slots)
        options = {"layer": slots.layer, "sinks": self._sink_logits(), **self._options()}
        return paged_attention(q, keys, values, table, slots.lengths, **options)

    def _attend_to_rows(self, q: Float[Array, "B S H D"], seen: Seen, slots: Slots) -> Float[Array, "B S H D"]:
        """Attention of several tokens of rows that have others before."""
        documents = {"segment_ids": slots.tokens, "kv_segment_ids": seen.filled}
        place = {"query_offset": seen.offset, "sinks": self._sink_logits()}
        return attention(q, seen.keys, seen.values, **documents, **place, **self._options())

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
        if self.qkv.bias is not None or self.q_norm is not None or self.limit is not None:
            return "a bias, a norm or a limit comes between projection and turn"
        if self.gated:
            return "gates come between its queries"
        if self.turning != self.shape[2] or self.interleaved:
            return "its heads do not turn whole, by pairs of their halves"
        if set(self.qkv.dtypes(dtype)) != {jnp.dtype(dtype)}:
            return "its projections are computed in another dtype"
        return None

    def _heads(
        self, x: Float[Array, "B S E"], context: Context, key: PRNGKeyArray | None, prepared: PreparedRows | None
    ) -> tuple[Float[Array, "B S H D"], Float[Array, "B S K D"], Float[Array, "B S K D"], Array | None]:
        """Queries, keys and values by head, ready for attention, and gates of its output, if there are any.

        Without normalisations they come out of one product in one pass, and are residuals in its place: the backward
        pass needs it no more. A normalisation needs its input there. Adapters are applied in the same pass where they
        can be, and what `lora.norm` makes of x may be given.
        """
        x = x.astype(jnp.float32) if self.float32 else x
        *heads, gate = self._turned_heads(x, context, key, prepared)
        if self.gate is not None:
            (gate,) = (part.reshape(heads[0].shape) for part in self.gate(x, key))
        q, k, v = (checkpoint_name(each, HEADS) for each in heads)
        return q, k, v, None if gate is None else checkpoint_name(gate, HEADS)

    def _turned_heads(self, x: Array, context: Context, key: PRNGKeyArray | None, prepared: PreparedRows | None) -> Any:
        heads, key_heads, size = self.shape
        rotary = (None, None) if self.settings.rope is None else context.rotary[self.settings.rope]
        scales = context.query_scales.get(self.settings.rope or "")
        if rotary[0] is not None and rotary[1] is not None and self.why_not_fused(x.dtype) is None:
            weight, matrices = self.qkv.operand, matrices_of(self.qkv.adapters)
            parts = describe(self.qkv.parts, self.qkv.adapters)
            arrays = heads_unit.Operands(weight, rotary[0], rotary[1], matrices, key, prepared)
            q, k, v = heads_unit.project_heads(parts, (heads, key_heads), x, arrays)
            return q if scales is None else q * scales.astype(q.dtype)[:, :, None, None], k, v, None
        assert prepared is None, "it is for the unit"
        whole = self.qkv.whole(x, key) if self.q_norm is None and not self.gated else None
        if whole is not None:
            options: dict[str, Any] = {"heads": heads, "key_heads": key_heads, "interleaved": self.interleaved}

            def turn(product, cos, sin, scales):
                return split_rope(product, cos, sin, query_scales=scales, **options)

            island = local(turn, in_specs=(ROWS,) * 4, out_specs=ROWS)
            q, k, v = (name_residual(part, "projection") for part in island(self._clipped(whole), *rotary, scales))
            return q, k, v, None
        parts, gate = self.qkv(x, key), None
        if len(parts) == 1:
            parts = jnp.split(parts[0], [heads * size, (heads + key_heads) * size], axis=-1)
        q, k, v = parts
        if self.gated:
            q, gate = jnp.split(q.reshape(*x.shape[:2], heads, 2 * size), 2, axis=-1)
        q, k = self._turned(q, self.q_norm, *rotary), self._turned(k, self.k_norm, *rotary)
        if scales is not None:
            q = q * scales.astype(q.dtype)[:, :, None, None]
        return q, k, self._clipped(v).reshape(*x.shape[:2], key_heads, size), gate

    def _clipped(self, x: Float[Array, "*rows N"]) -> Float[Array, "*rows N"]:
        return x if self.limit is None else jnp.clip(x, -self.limit, self.limit)

    def _turned(
        self, x: Float[Array, "B S ..."], norm: Norm | None, cos: Array | None, sin: Array | None
    ) -> Float[Array, "B S H D"]:
        """Queries or keys by head: normalised and turned, or the other way round."""
        batch, length, size = *x.shape[:2], self.shape[2]
        if norm is not None and self.whole and not self.norm_last:
            x = norm(x.reshape(batch, length, -1))
        x = x.reshape(batch, length, -1, size)
        if norm is not None and not self.whole and not self.norm_last:
            x = norm(x)
        x = self._clipped(x)
        if cos is not None and sin is not None:
            x = rope(x, cos, sin, interleaved=self.interleaved)
        if norm is not None and self.norm_last:
            x = norm(x.reshape(batch, length, -1)).reshape(x.shape) if self.whole else norm(x)
        return x

    def _attend(self, q, k, v, ranges: SegmentRanges | None, key: PRNGKeyArray | None):
        """Causal attention of whole rows, on each device's own rows, or on the tokens of them that it has."""
        options = {"dropout": self.dropout, "sinks": self._sink_logits(), **self._options()}
        return attend(q, k, v, ranges, key, block=self.settings.block, across=self.across, **options)

    def _out(
        self,
        out: Float[Array, "B S H D"],
        gate: Float[Array, "B S H D"] | None,
        dtype: jnp.dtype,
        key: PRNGKeyArray | None,
        residual: Array | None,
    ) -> Float[Array, "B S E"]:
        """The projection of the heads' output, gated where there are gates, added to a residual stream."""
        out = out if gate is None else glu(gate, out, activation="sigmoid")
        return project_output(self.o, out, dtype, key, residual)

    def _sink_logits(self) -> Float[Array, " H"] | None:
        return None if self.sinks is None else self.sinks.weight[...].astype(jnp.float32)

    def _options(self) -> dict[str, Any]:
        return {
            "sliding_window": self.settings.sliding_window,
            "logits_soft_cap": self.soft_cap,
            "scale": self.scale,
        }
