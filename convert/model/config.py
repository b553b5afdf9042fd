"""A model's settings from config.json, checked once and frozen.

`ModelConfig` alone determines the decoder and its weights; `convert.families.mapping` reads it from a config.json.
"""

import dataclasses
import functools

from convert.model.layers import MOE, Attention, GatedDelta, LatentAttention, Layer
from convert.model.moe import MoeConfig
from convert.model.paths import WeightPath
from convert.model.rope import RopeConfig
from convert.model.spec import Group, Row, WeightSpec, dimensions, fill_table, groups, head_flag, qk_norm_flag


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder, field names as in Hugging Face's config.json where they mean the same.

    Attributes:
        rows: the family's table of weights, in names of dimensions and flags; the sizes are this config's (`specs`).
        layers: kind of each layer.
        biases: the groups of projections with biases, of "self_attn.qkv", "self_attn.o", "mlp.gate_up", "mlp.down",
            "mlp.shared_expert.gate_up" and "mlp.shared_expert.down"; and "lm_head".
        attention_multiplier: factor of the products of queries and keys.
        fused: the blocks whose projections of the input are one module in files and adapters: queries, keys and values
            of "self_attn", gate and up of "mlp".
        norm: "rms", or "layer", which subtracts the mean.
        norm_offset: added to a normalisation's scale.
        post_norm_eps: in the place of norm_eps behind attention and MLP; None: that.
        norm_float32: whether normalised values are rounded only after the scale.
        attention_norms: names of the normalisations before and after the attention, or None.
        mlp_norms: names of the normalisations before and after the MLP, or None.
        recurrent_norms: both of layers with a recurrent state, where they differ.
        parallel_block: whether attention and MLP read the same input and are added at once.
        qk_norm: how queries and keys are normalised: "head" (one scale for all heads), "unscaled head" (each head, by
            no scale), "heads" (a scale for each), "projection" (all heads together), or None.
        qk_norm_after_rope: whether queries and keys are normalised after the rotation, not before it.
        attention_gate: where the gates come from whose sigmoids the heads' outputs are multiplied by: "queries" (the
            queries' projection is twice as wide, with query and gate of each head), "projection" (`gate_proj`), or
            None: there are none.
        gated: whether the MLP is down(act(gate(x)) · up(x)); False: down(act(up(x))), with `up_proj` alone in
            "mlp.gate_up".
        clip_qkv: largest magnitude of the elements of queries, keys and values, which are clipped before the rotation.
        rope: rotary positions of full-attention layers.
        local_rope: those of windowed layers, where they differ, or of the layers that name them.
        rope_interleaved: whether rotary pairs are neighbours, not one feature of each half.
        attn_logit_softcapping: products of queries and keys become cap · tanh(product / cap).
        final_logit_softcapping: logits become cap · tanh(logit / cap).
        attention_sinks: whether each head has a logit of no key in the softmax's denominator.
        moe: the mixture of experts of layers that have one.
        swiglu_limit: of hidden_act "clamped_swiglu", (up + 1) · gate · sigmoid(alpha · gate): the gate's largest value,
            and up's largest magnitude.
        swiglu_alpha: factor of the gate in its sigmoid, there.
        attention_dropout: dropout probability of attention weights in training.
        residual_dropout: dropout probability of the elements of attention's and MLP's outputs in training.
        embedding_dropout: dropout probability of the elements of the embeddings in training.
        embedding_norm: whether the embeddings are normalised, by no scale.
        embedding_multiplier: factor of the embeddings.
        residual_multiplier: factor of attention's and MLP's outputs.
        logit_scale: factor of the logits.
        scored: whether the head is one score of each place ("score", of reward models), not logits; then nothing is
            tied.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    max_position_embeddings: int
    initializer_range: float
    layers: tuple[Layer, ...]
    attention_multiplier: float
    rows: tuple[Row, ...] = dataclasses.field(repr=False, compare=False)
    biases: frozenset[str] = frozenset()
    fused: tuple[str, ...] = ()
    norm: str = "rms"
    norm_offset: float = 0.0
    post_norm_eps: float | None = None
    norm_float32: bool = False
    attention_norms: tuple[str | None, str | None] = ("input_layernorm", None)
    mlp_norms: tuple[str | None, str | None] = ("post_attention_layernorm", None)
    recurrent_norms: tuple[tuple[str | None, str | None], tuple[str | None, str | None]] | None = None
    parallel_block: bool = False
    qk_norm: str | None = None
    qk_norm_after_rope: bool = False
    attention_gate: str | None = None
    gated: bool = True
    clip_qkv: float | None = None
    local_rope: RopeConfig | None = None
    rope_interleaved: bool = False
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    attention_sinks: bool = False
    moe: MoeConfig | None = None
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    embedding_dropout: float = 0.0
    embedding_norm: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_scale: float = 1.0
    scored: bool = False

    @property
    def max_length(self) -> int:
        """The longest row that the rotary positions support, and in which attention sees all tokens."""
        longest = self.rope.max_length(self.max_position_embeddings)
        return longest if self.index_topk is None else min(longest, self.index_topk)

    @property
    def index_topk(self) -> int | None:
        """Tokens that an indexer of the attention chooses in longer rows; None: all are seen in any row."""
        return next((layer.index_topk for layer in self.attention if isinstance(layer, LatentAttention)), None)

    @property
    def attention(self) -> tuple[Attention | LatentAttention, ...]:
        """The attention of the layers that have one."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, Attention | LatentAttention))

    @property
    def recurrent(self) -> tuple[GatedDelta, ...]:
        """The settings of the layers with a recurrent state."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, GatedDelta))

    def norms_around(self, layer: Layer) -> tuple[tuple[str | None, str | None], tuple[str | None, str | None]]:
        """Names of the normalisations before and after a layer's mixer, and of those before and after its MLP."""
        if self.recurrent_norms is not None and isinstance(layer.mixer, GatedDelta):
            return self.recurrent_norms
        return self.attention_norms, self.mlp_norms

    @property
    def mixtures(self) -> tuple[bool, ...]:
        """Whether each layer has a mixture of experts."""
        return tuple(layer.ffn == MOE for layer in self.layers)

    @functools.cached_property
    def specs(self) -> tuple[WeightSpec, ...]:
        """Every weight, in the order of the model."""
        sizes = dimensions(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
        )
        head = head_flag(scored=self.scored, tied=self.tie_word_embeddings)
        flags = {*self.biases, qk_norm_flag(self.qk_norm), head}
        if self.moe is not None:
            sizes, flags = sizes | self.moe.sizes, flags | self.moe.flags
        return fill_table(self.rows, sizes, flags, self.layers)

    def layer_specs(self, layer: int) -> tuple[WeightSpec, ...]:
        """A layer's weights, without its number: normalisations, then projections."""
        return self._kinds[self.layers[layer]][0]

    def groups(self, layer: int) -> dict[str, Group]:
        """The projections of a layer, "block.group" -> group, in the order of the computation."""
        return self._kinds[self.layers[layer]][1]

    def group_of(self, module: WeightPath) -> Group:
        """The group of a layer's projection."""
        assert module.layer is not None
        candidates = (group for group in self.groups(module.layer).values() if group.block == module.block)
        return next(group for group in candidates if module.part in dict(group.parts))

    @functools.cached_property
    def _kinds(self) -> dict[Layer, tuple[tuple[WeightSpec, ...], dict[str, Group]]]:
        """A layer's kind -> its weights and groups."""
        kinds = {}
        for number, layer in enumerate(self.layers):
            if layer not in kinds:
                inside = [spec._replace(path=spec.path.inside) for spec in self.specs if spec.path.layer == number]
                specs = tuple(sorted(inside, key=lambda spec: spec.kind != "norm"))
                kinds[layer] = specs, groups(specs)
        return kinds
