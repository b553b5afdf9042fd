"""One layer of the decoder."""

from typing import Any

from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray

from convert.model.layers import MOE
from fastjax.models.chunks import by_chunks
from fastjax.models.context import Context
from fastjax.models.layer_loop import Sums
from fastjax.models.layer_parts import LayerParts
from fastjax.models.mixers import MIXERS, Mixer, Mixing
from fastjax.models.mlp import build_mlp
from fastjax.models.moe import Mixture, build_mixture
from fastjax.models.residual_stream import FeedForward, Stream
from fastjax.residuals import ATTENDED


class DecoderLayer(nnx.Module):
    """One layer: x + mixer(x), then x + mlp(x), or both at once; with normalisations before and after each.

    The mixer is an attribute under the name of its block.

    Attributes:
        block: that name.
        mlp: the MLP, or the mixture of experts.
        around_mixer: names of the normalisations before and after the mixer, which are attributes; or None.
        around_mlp: likewise.
        parallel: whether the MLP has the mixer's input.
        multiplier: factor of both outputs.
        split: of its tokens on several devices along `tensor` (`parallel.split_axis`).
    """

    def __init__(self, parts: LayerParts):
        config, settings = parts.config, parts.layer.mixer
        self.around_mixer, self.around_mlp = config.attention_norms, config.mlp_norms
        self.parallel, self.multiplier = config.parallel_block, config.residual_multiplier
        self.dropout, self.split = config.residual_dropout, 0
        for name in dict.fromkeys((*self.around_mixer, *self.around_mlp)):
            if name is not None:
                setattr(self, name, parts.norm(name))
        self.block = settings.block
        setattr(self, self.block, MIXERS[type(settings)](settings, parts))
        self.mlp = build_mixture(parts) if parts.layer.ffn == MOE else build_mlp(parts, "mlp")

    @property
    def mixer(self) -> Mixer:
        """What mixes its tokens."""
        return getattr(self, self.block)

    def __call__(
        self,
        x: Float[Array, "B S E"],
        context: Context,
        key: PRNGKeyArray | None,
        places: int | None = None,
        mixer: Mixing | None = None,
    ) -> tuple[Float[Array, "B S E"], Sums]:
        """The layer's output; a router's sums.

        Args:
            x: the input.
            context: of all layers.
            key: the layer's dropout key; None switches dropout off.
            places: along the sequence, that an MLP computes at a time (`chunks`); None: all.
            mixer: in the place of its own; None: that.
        """
        mixing = self.mixer if mixer is None else mixer
        stream = self._stream(self.block, self.around_mixer)
        x, read, made = stream.read(x, None if self.parallel else mixing.united(x.dtype), key)
        if stream.as_is:
            x = mixing(read, context, key, x, made)
        else:
            x = stream.added(x, mixing(read, context, key, None, made), key)
        x = checkpoint_name(x, ATTENDED)
        stream = self._stream("mlp", self.around_mlp)
        if isinstance(self.mlp, Mixture):
            if not self.parallel:
                x, read = stream.normed(x)
            output, sums = self.mlp(read, key, context.mask)
            return stream.added(x, output, key), sums
        tokens = (x, read) if self.parallel else (x,)
        return _feed_forward(FeedForward(stream, self.mlp), key, tokens, places), {}

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
