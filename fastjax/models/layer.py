"""One layer of the decoder."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray

from convert.model.layers import MOE
from fastjax.lora.params import Constant
from fastjax.lora.units import WHOLE
from fastjax.models.context import Context, Sums, added
from fastjax.models.layer_inputs import LayerInputs
from fastjax.models.mixers import MIXERS, Mixer
from fastjax.models.mlp import build_mlp
from fastjax.models.moe import Mixture, build_mixture
from fastjax.models.projection import low_rank_adapters, quantized_projections
from fastjax.models.residual_stream import FeedForward, Stream
from fastjax.residuals import ATTENDED


class DecoderLayer(nnx.Module):
    """One layer: x + mixer(x), then x + mlp(x), or both at once; with normalisations before and after each.

    The mixer is an attribute under the name of its block.

    Attributes:
        block: that name.
        mlp: the MLP, or the mixture of experts.
        around_mixer: names of the normalisations before and after the mixer, which are attributes; or None.
        around_mlp: names of those around the MLP; or None.
        parallel: whether the MLP has the mixer's input.
        multiplier: factor of both outputs.
        tokens: of the stream that it has.
        feed: (part, key, tokens) -> what the part makes of them: at once, or as an execution has it.
    """

    def __init__(self, inputs: LayerInputs):
        config, settings = inputs.config, inputs.layer.mixer
        self.around_mixer, self.around_mlp = config.norms_around(inputs.layer)
        self.parallel, self.multiplier = config.parallel_block, config.residual_multiplier
        self.dropout, self.tokens, self.feed = config.residual_dropout, WHOLE, at_once
        for before, after in (self.around_mixer, self.around_mlp):
            for name, eps in ((before, None), (after, config.post_norm_eps)):
                if name is not None:
                    setattr(self, name, inputs.norm(name, eps=eps))
        self.block = settings.block
        setattr(self, self.block, MIXERS[type(settings)](settings, inputs))
        self.mlp = build_mixture(inputs) if inputs.layer.ffn == MOE else build_mlp(inputs, "mlp")

    @property
    def mixer(self) -> Mixer:
        """The mixer of its tokens."""
        return getattr(self, self.block)

    def __call__(
        self,
        x: Float[Array, "B S E"],
        context: Context,
        key: PRNGKeyArray | None,
        mix: Callable[..., Array] | None = None,
    ) -> tuple[Float[Array, "B S E"], Sums]:
        """The layer's output; a router's sums.

        Args:
            x: the input.
            context: of all layers.
            key: the layer's dropout key; None switches dropout off.
            mix: a call in the place of its mixer's; None: that.
        """
        mix = self.mixer if mix is None else mix
        stream = self._stream(self.block, self.around_mixer)
        x, read, prepared = stream.read(x, None if self.parallel else self.mixer.united(x.dtype), key)
        if stream.as_is:
            x = mix(read, context, key, x, prepared)
        else:
            x = stream.added(x, mix(read, context, key, None, prepared), key)
        x = checkpoint_name(x, ATTENDED)
        stream = self._stream("mlp", self.around_mlp)
        if isinstance(self.mlp, Mixture):
            if not self.parallel:
                x, read = stream.normed(x)
            output, sums = self.mlp(read, key, context.mask)
            return stream.added(x, output, key), sums
        tokens = (x, read) if self.parallel else (x,)
        return self.feed(FeedForward(stream, self.mlp), key, tokens), {}

    def _stream(self, name: str, norms: tuple[str | None, str | None]) -> Stream:
        before, after = (None if norm is None else getattr(self, norm) for norm in norms)
        return Stream(name, before, after, self.multiplier, self.dropout, self.tokens)


def at_once(part: FeedForward, key: PRNGKeyArray | None, tokens: tuple[Array, ...]) -> Float[Array, "B S E"]:
    """The feed-forward part of all tokens."""
    return part(key, *tokens)


def apply_layers(layers: Any, x: Array, context: Context, first: Array) -> tuple[Float[Array, "B S E"], Sums]:
    """Layers one after another on whole rows.

    Args:
        layers: modules.
        x: the first one's input.
        context: of all layers.
        first: its number.
    """
    total: Sums = {}
    for position, layer in enumerate(layers):
        key = None if context.key is None else jax.random.fold_in(context.key, first + position)
        if context.quantizing is not None:
            for projection in quantized_projections(layer):
                projection.quantizing = nnx.data(Constant(context.quantizing))
        x, sums = layer(x, context, key)
        total = added(total, sums)
    return x, total


def step_layers(layers: Any, x: Array, context: Context, first: Array, states: Sequence[Any]) -> tuple[Any, ...]:
    """Layers one after another on new tokens.

    Args:
        layers: modules.
        x: the first one's input.
        context: of all layers, with `slots` of theirs.
        first: its number, which no layer asks for here.
        states: of each layer, and its like in the stack.

    Returns:
        The output, the states after it, and no sums.
    """
    after: list[Any] = []
    if context.chosen is not None:
        for adapter in low_rank_adapters(layers):
            adapter.chosen = nnx.data(Constant(context.chosen))
    for layer, state in zip(layers, states, strict=True):

        def step(x: Array, context: Context, _: None, *rest: Any, layer: Any = layer, state: Any = state) -> Array:
            out, following = layer.mixer.step(x, state, context, *rest)
            after.append(following)
            return out

        x, _ = layer(x, context, None, step)
    return x, after, {}
