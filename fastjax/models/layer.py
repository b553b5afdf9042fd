"""One layer of the decoder."""

from collections.abc import Collection, Mapping
from typing import Any

from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray

from convert.model.config import ModelConfig
from convert.model.paths import WeightPath
from fastjax.models.attention import Attention, Context, LayerCache, Sinks
from fastjax.models.chunks import by_chunks
from fastjax.models.layer_loop import Sums
from fastjax.models.layout import array_at
from fastjax.models.mlp import MLP
from fastjax.models.moe import Mixture, build_mixture
from fastjax.models.norms import Norm
from fastjax.models.projection import Projection
from fastjax.models.residual_stream import FeedForward, Stream
from fastjax.residuals import ATTENDED


class DecoderLayer(nnx.Module):
    """One layer: x + attention(x), then x + mlp(x), or both at once; with normalisations before and after each.

    Attributes:
        self_attn: the attention.
        mlp: the MLP, or the mixture of experts.
        around_attention: names of the normalisations before and after the attention, which are attributes; or None.
        around_mlp: likewise.
        parallel: whether the MLP has the attention's input.
        multiplier: factor of both outputs.
        split: of its tokens on several devices along `tensor` (`parallel.split_axis`).
    """

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        weights: Mapping[str, Any],
        adapters: Mapping[str, Any],
        float32: Collection[str] = (),
        *,
        float8: bool = False,
    ):
        layer, groups = config.layers[index], config.groups(index)

        def projection(name: str) -> Projection:
            group = groups[name]
            modules = {part: WeightPath(None, group.block, part, "") for part, _ in group.parts}
            own = {part: adapters[module] for part, module in modules.items() if module in adapters}
            wide = [part for part, module in modules.items() if module in float32]
            bias = array_at(weights, group.path.with_leaf("bias")) if group.bias else None
            return Projection(group.parts, array_at(weights, group.path), bias, own, wide, float8=float8)

        def norm(part: str, block: str = "") -> Norm:
            inside = weights[block] if block else weights
            return Norm(config, inside[part]["weight"], WeightPath(None, block, part, "") in float32)

        qk_norms = None if config.qk_norm is None else (norm("q_norm", "self_attn"), norm("k_norm", "self_attn"))
        self.around_attention, self.around_mlp = config.attention_norms, config.mlp_norms
        self.parallel, self.multiplier = config.parallel_block, config.residual_multiplier
        self.dropout, self.split = config.residual_dropout, 0
        for name in dict.fromkeys((*self.around_attention, *self.around_mlp)):
            if name is not None:
                setattr(self, name, norm(name))
        sinks = Sinks(weights["self_attn"]["sinks"]["weight"]) if config.attention_sinks else None
        qkv, o, wide = projection("self_attn.qkv"), projection("self_attn.o"), "self_attn" in float32
        self.self_attn = Attention(config, layer, qkv, o, qk_norms, wide, sinks)

        def mlp(block: str) -> MLP:
            inner, outer = projection(f"{block}.gate_up"), projection(f"{block}.down")
            return MLP(config.hidden_act, inner, outer, block in float32, gated=config.gated)

        if layer.moe:
            shared = mlp("mlp.shared_expert") if "mlp.shared_expert.down" in groups else None
            self.mlp = build_mixture(config, weights["mlp"], adapters, float32, shared)
        else:
            self.mlp = mlp("mlp")

    def __call__(
        self,
        x: Float[Array, "B S E"],
        context: Context,
        key: PRNGKeyArray | None,
        cache: LayerCache | None,
        places: int | None = None,
    ) -> tuple[Float[Array, "B S E"], LayerCache | None, Sums]:
        """The layer's output; the cache with this step's keys and values, if there is one; a router's sums.

        Args:
            x: the input.
            context: of all layers.
            key: the layer's dropout key; None switches dropout off.
            cache: keys and values of past tokens, or None.
            places: along the sequence, that an MLP computes at a time (`chunks`); None: all.
        """
        stream, attention = self._stream("self_attn", self.around_attention), self.self_attn
        whole = attention.float32 or attention.why_not_fused(x.dtype) is not None or self.parallel
        x, read, made = stream.read(x, None if whole else attention.qkv, key)
        if stream.as_is:
            x, cache = attention(read, context, key, cache, x, made)
        else:
            attended, cache = attention(read, context, key, cache, None, made)
            x = stream.added(x, attended, key)
        x = checkpoint_name(x, ATTENDED)
        stream = self._stream("mlp", self.around_mlp)
        if isinstance(self.mlp, Mixture):
            if not self.parallel:
                x, read = stream.normed(x)
            output, sums = self.mlp(read, key, context.mask)
            return stream.added(x, output, key), cache, sums
        tokens = (x, read) if self.parallel else (x,)
        return _feed_forward(FeedForward(stream, self.mlp), key, tokens, places), cache, {}

    def _stream(self, name: str, norms: tuple[str | None, str | None]) -> Stream:
        before, after = (None if norm is None else getattr(self, norm) for norm in norms)
        return Stream(name, before, after, self.multiplier, self.dropout, self.split)


def _feed_forward(
    part: FeedForward, key: PRNGKeyArray | None, tokens: tuple[Array, ...], places: int | None
) -> Float[Array, "B S E"]:
    """The MLP's part of a layer, of so many places at a time."""
    if places is None:
        return part(key, *tokens)
    graphdef, state = nnx.split(part)

    def run(state: Any, key: PRNGKeyArray | None, *tokens: Array) -> Array:
        return nnx.merge(graphdef, state)(key, *tokens)

    decode = part.mlp.decoded_dtype(tokens[0].dtype)
    return by_chunks(run, nnx.to_pure_dict(state), key, *tokens, places=places, decode=decode)
