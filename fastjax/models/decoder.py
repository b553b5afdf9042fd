"""The one decoder: layers driven by a ModelConfig, scanned or unrolled.

Modules are the definition and plain pytrees the state: `nnx.split` once, then pure functions. The layer loop runs over
runs of layers (`layout.Run`): a run of stacked layers is a `lax.scan`, a single layer a plain call.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray

from convert.model.config import Layer, ModelConfig
from convert.model.paths import WeightPath
from fastjax.lora import LoraEmbedding, LoraLinear, SavedParam, drop
from fastjax.models.attention import Attention, Context, LayerCache, document_ranges
from fastjax.models.layout import Run
from fastjax.models.mlp import MLP
from fastjax.models.neftune import noisy_embeddings
from fastjax.models.norms import Norm
from fastjax.models.precision import Precision
from fastjax.models.projection import Embedding, Head, Projection
from fastjax.models.remat import checkpointed
from fastjax.models.rotary import document_lengths, rope_tables
from fastjax.parallel.gather import gathered
from fastjax.trainable_tokens import TrainableTokens


class DecoderLayer(nnx.Module):
    """One layer: x + attention(x), then x + mlp(x), or both at once; with normalisations before and after each.

    Attributes:
        around_attention: names of the normalisations before and after the attention, which are attributes; or None.
        around_mlp: likewise.
        parallel: whether the MLP reads what the attention reads.
        multiplier: of what the two add.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: Layer,
        weights: Mapping[str, Any],
        adapters: Mapping[str, LoraLinear],
        float32: Collection[str] = (),
    ):

        def projection(name: str) -> Projection:
            group = config.groups[name]
            modules = {part: WeightPath(None, group.block, part, "") for part, _ in group.parts}
            own = {part: adapters[module] for part, module in modules.items() if module in adapters}
            wide = [part for part, module in modules.items() if module in float32]
            tree = weights[group.block][group.name]
            return Projection(group.parts, tree["weight"], tree.get("bias"), own, wide)

        def norm(part: str, block: str = "") -> Norm:
            inside = weights[block] if block else weights
            return Norm(config, inside[part]["weight"], WeightPath(None, block, part, "") in float32)

        qk_norms = None if config.qk_norm is None else (norm("q_norm", "self_attn"), norm("k_norm", "self_attn"))
        self.around_attention, self.around_mlp = config.attention_norms, config.mlp_norms
        self.parallel, self.multiplier = config.parallel_block, config.residual_multiplier
        for name in dict.fromkeys((*self.around_attention, *self.around_mlp)):
            if name is not None:
                setattr(self, name, norm(name))
        self.self_attn = Attention(
            config, layer, projection("self_attn.qkv"), projection("self_attn.o"), qk_norms, "self_attn" in float32
        )
        self.mlp = MLP(config.hidden_act, projection("mlp.gate_up"), projection("mlp.down"), "mlp" in float32)

    def __call__(
        self, x: Float[Array, "B S E"], context: Context, key: PRNGKeyArray | None, cache: LayerCache | None
    ) -> tuple[Float[Array, "B S E"], LayerCache | None]:
        """The layer's output and, given a cache, the cache with this step's keys and values."""
        before, after = self.around_attention
        read = self._normed(before, x)
        attended, cache = self.self_attn(read, context, key, cache)
        x = x + self._added(after, attended)
        before, after = self.around_mlp
        return x + self._added(after, self.mlp(read if self.parallel else self._normed(before, x), key)), cache

    def _normed(self, name: str | None, x: Float[Array, "B S E"]) -> Float[Array, "B S E"]:
        return x if name is None else getattr(self, name)(x)

    def _added(self, norm: str | None, x: Float[Array, "B S E"]) -> Float[Array, "B S E"]:
        """What a block adds, of what it gives."""
        x = self._normed(norm, x)
        return x if self.multiplier == 1.0 else (x.astype(jnp.float32) * self.multiplier).astype(x.dtype)


class Decoder(nnx.Module):
    """Token ids in, hidden states out; `lm_head` turns these into logits.

    Attributes:
        embed_tokens: the table of embeddings.
        layers: modules arranged as `plan` says; leaves of a stacked run have a leading axis of its count.
        norm: the final normalisation.
        lm_head: the output projection; on tied embeddings its weight is the table's own variable.
        plan: the runs of layers.
        precision: of the computation; `precision.dtype` is that of the activations between the layers.
        remat: "full" (only the layers' inputs are kept for the backward pass), "projections" (the projections' and the
            attention's results too) or "none".
    """

    def __init__(
        self,
        config: ModelConfig,
        plan: Sequence[Run],
        weights: Mapping[str, Any],
        adapters: Mapping[str, Any],
        *,
        precision: Precision,
        remat: str,
    ):
        """Build the modules around leaves that exist (arrays, stacked arrays, or their shapes).

        Args:
            config: the model.
            plan: how `weights["layers"]` is arranged.
            weights: {"embed_tokens": {"weight"}, "norm": {"weight"}, "lm_head": {"weight"} unless tied, "layers":
                trees by run and by position in the period}.
            adapters: {"layers": per run and position {"self_attn.q_proj": LoraLinear}, "embed_tokens": LoraEmbedding,
                "lm_head": LoraLinear, "saved": {"embed_tokens" | "lm_head" | "tied": array}, "tokens": {likewise:
                TrainableTokens}}, every part optional.
            precision: of the computation.
            remat: what the backward pass finds in memory.
        """
        self.config, self.plan, self.precision, self.remat = config, tuple(plan), precision, remat
        by_run = adapters.get("layers") or [[{}] * run.period for run in plan]
        self.layers = nnx.List(
            [
                nnx.List(
                    [
                        DecoderLayer(config, config.layers[index], w, a, precision.in_layer(index))
                        for index, (w, a) in enumerate(zip(ws, ads, strict=True), start=run.start)
                    ]
                )
                for run, ws, ads in zip(plan, weights["layers"], by_run, strict=True)
            ]
        )
        wide = precision.float32_modules
        self.norm = Norm(config, weights["norm"]["weight"], "norm" in wide)
        saved = {name: SavedParam(array) for name, array in adapters.get("saved", {}).items()}
        rows: Mapping[str, TrainableTokens] = adapters.get("tokens", {})
        table: LoraEmbedding | None = adapters.get("embed_tokens")
        shared = rows.get("tied")
        embedding = Embedding(
            weights["embed_tokens"]["weight"], table, rows.get("embed_tokens", shared), "embed_tokens" in wide
        )
        head = embedding.weight if config.tie_word_embeddings else weights["lm_head"]["weight"]
        for name in ("embed_tokens", "tied"):
            embedding.weight = saved.get(name, embedding.weight)
        for name in ("lm_head", "tied"):
            head = saved.get(name, head)
        own = {"lm_head": adapters["lm_head"]} if "lm_head" in adapters else None
        self.embed_tokens = embedding
        self.lm_head = Head(
            [("lm_head", config.vocab_size)],
            head,
            adapters=own,
            float32=wide & {"lm_head"},
            tokens=rows.get("lm_head", shared),
            scale=config.logit_scale,
            soft_cap=config.final_logit_softcapping,
        )

    def __call__(
        self,
        tokens: Int[Array, "B S"],
        positions: Int[Array, "B S"],
        segment_ids: Int[Array, "B S"] | None = None,
        *,
        key: PRNGKeyArray | None = None,
        neftune_noise_alpha: float | None = None,
    ) -> Float[Array, "B S E"]:
        """Hidden states after the final normalisation, in the compute dtype.

        Args:
            tokens: token ids.
            positions: position of each token in its document.
            segment_ids: document of each token, 0 for padding: each in one piece, numbers never decreasing along the
                row (`segment_ranges`); None: every row is one document.
            key: random state of dropout and noise; None switches both off.
            neftune_noise_alpha: size of the noise on the embeddings (`neftune`); None or 0: none.
        """
        x = self._embedded(tokens)
        if key is not None and neftune_noise_alpha:
            x = noisy_embeddings(x, segment_ids, key, neftune_noise_alpha)
        ranges = None if segment_ids is None else document_ranges(segment_ids)
        context = Context(self._rotary(positions, document_lengths(positions, segment_ids)), ranges, key)
        return self._run(x, context, None)[0]

    def cached(
        self,
        tokens: Int[Array, "B S"],
        positions: Int[Array, "B S"],
        segment_ids: Int[Array, "B S"],
        cache: Any,
        cache_index: Int[Array, ""],
        cache_segment_ids: Int[Array, "B T"],
    ) -> tuple[Float[Array, "B S E"], Any]:
        """Hidden states of S new tokens after those in the cache, and the cache with them.

        Args:
            tokens: the new tokens.
            positions: their positions.
            segment_ids: 1, or 0 for padding.
            cache: as `empty_cache` makes it.
            cache_index: slot of the first new token.
            cache_segment_ids: the slots that hold tokens, the new ones included.
        """
        # Keys are turned when they come, before it is known how long the row gets: it counts for as long as it may get.
        longest = jnp.full(positions.shape, cache_segment_ids.shape[1], jnp.int32)
        context = Context(self._rotary(positions, longest), None, None, segment_ids, cache_index, cache_segment_ids)
        return self._run(self._embedded(tokens), context, cache)

    def empty_cache(self, batch: int, length: int) -> Any:
        """Room for the keys and values of `length` tokens a row, in the dtype in which attention is computed."""
        shape = (batch, length, self.config.num_key_value_heads, self.config.head_dim)

        def one(run: Run, layer: DecoderLayer) -> LayerCache:
            full = shape if run.count == 1 else (run.count, *shape)
            dtype = jnp.float32 if layer.self_attn.float32 else self.precision.dtype
            return LayerCache(jnp.zeros(full, dtype), jnp.zeros(full, dtype))

        return [[one(run, layer) for layer in layers] for run, layers in zip(self.plan, self.layers, strict=True)]

    def head_input(self, hidden: Float[Array, "B S E"], key: PRNGKeyArray | None) -> Float[Array, "B S C"]:
        """What `lm_logits` takes: the hidden states; beside them a dropped copy if the head's adapter drops."""
        adapter = self.lm_head.adapters.get("lm_head")
        if adapter is None or key is None or adapter.dropout == 0.0:
            return hidden
        return jnp.concatenate([hidden, drop(hidden, key, "lm_head", adapter.dropout)], axis=-1)

    def _embedded(self, tokens: Int[Array, "B S"]) -> Float[Array, "B S E"]:
        x = self.embed_tokens(tokens, self.precision.dtype)
        multiplier = self.config.embedding_multiplier
        return x if multiplier == 1.0 else x * jnp.asarray(multiplier, x.dtype)

    def _rotary(self, positions: Int[Array, "B S"], lengths: Int[Array, "B S"]) -> dict[str, Any]:
        names = dict.fromkeys(layer.rope for layer in self.config.layers if layer.rope is not None)
        return {
            name: rope_tables(getattr(self.config, name), self.config.head_dim, positions, lengths) for name in names
        }

    def _run(self, x: Array, context: Context, cache: Any) -> tuple[Float[Array, "B S E"], Any]:
        caches = []
        for number, run in enumerate(self.plan):
            graphdef, variables = nnx.split(self.layers[number])
            state = nnx.to_pure_dict(variables)

            def block(x, state, context, index, cache, graphdef=graphdef, run=run):
                layers, after = nnx.merge(graphdef, gathered(state)), []
                for position, layer in enumerate(layers):
                    key = context.key
                    if key is not None:
                        key = jax.random.fold_in(key, run.start + index * run.period + position)
                    x, kept = layer(x, context, key, None if cache is None else cache[position])
                    after.append(kept)
                return x, None if cache is None else after

            block = checkpointed(block, self.remat if cache is None else "none", scanned=run.count > 1)
            past = None if cache is None else cache[number]
            if run.count == 1:
                x, after = block(x, state, context, jnp.int32(0), past)
            else:

                def body(x, xs, block=block):
                    state, index, past = xs
                    return block(x, state, context, index, past)

                x, after = jax.lax.scan(body, x, (state, jnp.arange(run.count, dtype=jnp.int32), past))
            caches.append(after)
        return self.norm(x), caches


def lm_logits(head: Head, hidden: Float[Array, "B S C"]) -> Float[Array, "B S V"]:
    """Logits of `Decoder.head_input`'s result in its dtype, or in float32 where the head is computed in it."""
    hidden = hidden.astype(jnp.float32) if head.float32 else hidden
    width = head.weight.get_value().shape[1]
    dropped = hidden[..., width:] if hidden.shape[-1] > width else None
    return head.finish(head(hidden[..., :width], dropped=dropped)[0])
