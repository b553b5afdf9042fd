"""The one decoder: token ids to hidden states to logits, driven by a ModelConfig.

Modules are the definition and plain pytrees the state: `nnx.split` once, then pure functions. A pass is three pieces:
`embed`, the layers as the decoder's `Executor` runs them, and the head (`lm_logits`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray

from convert.model.config import ModelConfig
from convert.model.paths import EMBEDDING, HEAD, NORM, SCORE
from fastjax.lora.attach import Adapters
from fastjax.lora.dropout import drop
from fastjax.lora.params import Constant
from fastjax.models.context import Context, Sums, document_ranges
from fastjax.models.executor import Executor
from fastjax.models.layer import DecoderLayer
from fastjax.models.layer_inputs import LayerInputs
from fastjax.models.layout import LayerStack
from fastjax.models.neftune import noisy_embeddings
from fastjax.models.norms import Norm
from fastjax.models.precision import Precision
from fastjax.models.projection import Embedding, Head, ScoreHead, without_adapters
from fastjax.models.rotary import document_lengths, query_scales, rope_fields, rope_tables


class Forward(NamedTuple):
    """The result of a forward pass.

    Attributes:
        hidden: hidden states after the final normalisation, in the compute dtype.
        sums: over the layers, of routers' loads; empty without mixtures of experts.
    """

    hidden: Float[Array, "B S E"]
    sums: Sums


class Decoder(nnx.Module):
    """Token ids in, hidden states out; `lm_head` turns these into logits.

    Attributes:
        embed_tokens: the table of embeddings.
        layers: modules arranged as `plan` says; leaves of a repeated stack have a leading axis of its count.
        embedding_norm: the embeddings' normalisation, or None.
        norm: the final normalisation.
        lm_head: the output projection; on tied embeddings its weight is the table's own variable. A reward model
            (`config.scored`) has none.
        score: its projection to scores; other models have none.
        plan: the layer stacks.
        precision: of the computation; `precision.dtype` is that of the activations between the layers.
        executor: how it is executed.
        quantizing: whether the layers' fake quantisers are in force, bool []; None: they are.
        rank_owners: where adapters are joined (`lora.joined`) the number of the adapter that each rank is of, int [R];
            None: they are not.
        start: the trained arrays as a run begins with them (`models.start`), or None.
    """

    lm_head: Head
    score: ScoreHead

    def __init__(
        self,
        config: ModelConfig,
        plan: Sequence[LayerStack],
        weights: Mapping[str, Any],
        adapters: Adapters | None = None,
        *,
        precision: Precision,
        executor: Executor | None = None,
    ):
        """Build the modules around leaves that exist (arrays, stacked arrays, or their shapes).

        Args:
            config: the model.
            plan: arrangement of `weights["layers"]`.
            weights: {"embed_tokens": {"weight"}, "norm": {"weight", "bias"}, "lm_head": {"weight", "bias"}, or of a
                reward model "score": {"weight"}, "layers": trees by stack and by position in the period}; of norm and
                head what the family's table has, and of a tied head no weight.
            adapters: with `layers` arranged as these; None: none.
            precision: of the computation.
            executor: how it is executed; None: one layer after another.
        """
        self.config, self.plan, self.precision = config, tuple(plan), precision
        self.executor: Executor = executor or Executor()
        self.quantizing: Constant | None = None
        self.rank_owners: Constant | None = None
        self.start: nnx.Dict | None = None
        adapters = adapters or Adapters([[{}] * stack.period for stack in plan])
        self.layers = nnx.List(
            [
                nnx.List(
                    [
                        DecoderLayer(
                            LayerInputs(config, index, w, a, precision.in_layer(index), precision.base_compute)
                        )
                        for index, (w, a) in enumerate(zip(ws, ads, strict=True), start=stack.start)
                    ]
                )
                for stack, ws, ads in zip(plan, weights["layers"], adapters.layers, strict=True)
            ]
        )
        wide = precision.float32_modules
        offset = 0.0 if any(spec.kind == "scale" and spec.path.module == NORM for spec in config.specs) else None
        self.norm = Norm(config, weights.get(NORM, {}), NORM in wide, offset=offset)
        self.embedding_norm = Norm(config, {}) if config.embedding_norm else None
        rows, whole = adapters.rows, adapters.whole
        embedding = Embedding(weights[EMBEDDING]["weight"], adapters.embedding, rows.get(EMBEDDING), EMBEDDING in wide)
        table = embedding.weight
        embedding.weight = whole.get(EMBEDDING, table)
        self.embed_tokens = embedding
        if config.scored:
            self.score = ScoreHead(whole.get(SCORE, weights[SCORE]["weight"]))
            return
        head = table if config.tie_word_embeddings else weights[HEAD]["weight"]
        self.lm_head = Head(
            [(HEAD, config.vocab_size)],
            whole.get(HEAD, head),
            weights.get(HEAD, {}).get("bias"),
            adapters=None if adapters.head is None else {HEAD: adapters.head},
            float32=wide & {HEAD},
            tokens=rows.get(HEAD),
            scale=config.logit_scale,
            soft_cap=config.final_logit_softcapping,
        )

    def __call__(self, *arguments: Any, **options: Any) -> Float[Array, "B S E"]:
        """The hidden states of `forward`."""
        return self.forward(*arguments, **options).hidden

    def forward(
        self,
        tokens: Int[Array, "B S"],
        positions: Int[Array, "B S"],
        segment_ids: Int[Array, "B S"] | None = None,
        *,
        key: PRNGKeyArray | None = None,
        neftune_noise_alpha: float | None = None,
        adapters: bool = True,
    ) -> Forward:
        """Hidden states, and sums over the layers.

        Args:
            tokens: token ids.
            positions: position of each token in its document.
            segment_ids: document of each token, 0 for padding: each in one piece, numbers never decreasing along the
                row (`segment_ranges`); None: every row is one document.
            key: random state of dropout and noise; None switches both off.
            neftune_noise_alpha: size of the noise on the embeddings (`neftune`); None or 0: none.
            adapters: False: the base model's pass, without low-rank adapters and trained rows.

        Raises:
            ConfigError: no adapters, but a table that is trained whole, in the place of the base's.
        """
        model = self if adapters else without_adapters(self)
        ranges = None if segment_ids is None else document_ranges(segment_ids)
        lengths = document_lengths(positions, segment_ids)
        tokens, positions, segment_ids, lengths = self.executor.own_tokens((tokens, positions, segment_ids, lengths))
        x = embed(model, tokens)
        x = drop(x, key, EMBEDDING, self.config.embedding_dropout)
        if key is not None and neftune_noise_alpha:
            x = noisy_embeddings(x, segment_ids, key, neftune_noise_alpha)
        rotary = rotary_tables(self.config, positions, lengths)
        mask = None if segment_ids is None else segment_ids != 0
        context = Context(rotary, ranges, key, query_scales=query_scales(self.config, positions), mask=mask)
        if model.quantizing is not None:
            context = context._replace(quantizing=model.quantizing[...])
        with jax.named_scope("layers"):
            x, sums = self.executor.run(model, x, context)
        return Forward(model.norm(self.executor.in_order(x)), sums)

    def head_input(self, hidden: Float[Array, "B S E"], key: PRNGKeyArray | None) -> Float[Array, "B S C"]:
        """The input of `lm_logits`: the hidden states; beside them a dropped copy if the head's adapter drops."""
        adapter = self.lm_head.adapters.get(HEAD)
        if adapter is None or key is None or adapter.dropout == 0.0:
            return hidden
        return jnp.concatenate([hidden, drop(hidden, key, HEAD, adapter.dropout)], axis=-1)


@jax.named_scope("embed")
def embed(model: Decoder, tokens: Int[Array, "B S"]) -> Float[Array, "B S E"]:
    """The first layer's input: embeddings in the compute dtype, scaled as the family has it."""
    x = model.embed_tokens(tokens, model.precision.dtype, model.executor.look_up)
    x = x if model.embedding_norm is None else model.embedding_norm(x)
    multiplier = model.config.embedding_multiplier
    return x if multiplier == 1.0 else x * jnp.asarray(multiplier, x.dtype)


def rotary_tables(config: ModelConfig, positions: Int[Array, "B S"], lengths: Int[Array, "B S"]) -> dict[str, Any]:
    """`Context.rotary`.

    Args:
        config: the model's.
        positions: position of each token in its document.
        lengths: tokens of that document.
    """
    ropes = rope_fields(config)
    return {name: rope_tables(rope, config.head_dim, positions, lengths) for name, rope in ropes.items()}


@jax.named_scope("head")
def lm_logits(head: Head, hidden: Float[Array, "B S C"], *, adapters: bool = True) -> Float[Array, "B S V"]:
    """Logits of `Decoder.head_input`'s result in its dtype, or in float32 where the head is computed in it.

    Args:
        head: `Decoder.lm_head`.
        hidden: hidden states, with a dropped copy behind them or not.
        adapters: as in `Decoder.forward`.
    """
    head = head if adapters else without_adapters(head)
    hidden = hidden.astype(jnp.float32) if head.float32 else hidden
    width = head.weight.get_value().shape[1]
    dropped = hidden[..., width:] if hidden.shape[-1] > width else None
    return head.finish(head(hidden[..., :width], dropped=dropped)[0])
