"""How a part of a layer reads the residual stream, and how its output is added to it."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

from fastjax.lora.dropout import drop
from fastjax.lora.linear import describe, matrices_of
from fastjax.lora.norm import NormConstants, PreparedRows, normed_products
from fastjax.lora.rank_products import drops
from fastjax.lora.units import Tokens
from fastjax.models.mlp import MLP
from fastjax.models.norms import Norm
from fastjax.models.projection import Projection
from fastjax.quantization.weights import as_weight
from fastjax.residuals import name_residual


class Stream(nnx.Module):
    """The way from the residual stream to attention or MLP and back.

    Attributes:
        name: of the part, for its mask of dropout.
        before: normalisation of its input, or None.
        after: of its output, or None.
        multiplier: factor of the output.
        dropout: probability of a zero in the output in training.
        tokens: those of the stream that there are here.
    """

    def __init__(
        self, name: str, before: Norm | None, after: Norm | None, multiplier: float, dropout: float, tokens: Tokens
    ):
        self.name, self.before, self.after = name, before, after
        self.multiplier, self.dropout, self.tokens = multiplier, dropout, tokens

    @property
    def as_is(self) -> bool:
        """Whether the output is added as it is."""
        return self.after is None and self.multiplier == 1.0 and self.dropout == 0.0

    def normed(self, x: Float[Array, "B S E"]) -> tuple[Float[Array, "B S E"], Float[Array, "B S E"]]:
        """The residual stream, to be read in its place; the part's input."""
        return (x, x) if self.before is None else self.before.beside(x)

    def read(
        self, x: Float[Array, "B S E"], projection: Projection | None, key: PRNGKeyArray | None
    ) -> tuple[Float[Array, "B S E"], Float[Array, "B S E"], PreparedRows | None]:
        """The residual stream, to be read in its place; the normalised rows; what else a projection reads of them.

        Where layers are shared the rows are of all tokens, and nothing else is prepared.

        Args:
            x: the residual stream.
            projection: what reads the rows with its adapters; None: it makes its own rank products.
            key: the layer's dropout key.
        """
        norm = self.before
        if self.tokens.shared:
            x, normed = self.normed(x)
            return x, name_residual(self.tokens.all_of(normed), "gathered"), None
        if norm is None or projection is None or not projection.adapters:
            return *self.normed(x), None
        parts = describe(projection.parts, projection.adapters)
        if norm.weight is None or not norm.plain or drops(parts, key) or set(projection.dtypes(x.dtype)) != {x.dtype}:
            return *self.normed(x), None
        scale = NormConstants(norm.eps, norm.offset)
        rounds = x.dtype == jnp.bfloat16 and as_weight(projection.operand).reads_rounded(False)
        return normed_products(scale, parts, x, norm.weight[...], matrices_of(projection.adapters), rounds=rounds)

    def added(
        self, x: Float[Array, "B S E"], output: Float[Array, "B S E"], key: PRNGKeyArray | None
    ) -> Float[Array, "B S E"]:
        """The residual stream with the part's output.

        Args:
            x: the residual stream.
            output: of the part.
            key: the layer's dropout key.
        """
        output = drop(output, key, self.name, self.dropout)
        output = output if self.after is None else self.after(output)
        if self.multiplier != 1.0:
            output = (output.astype(jnp.float32) * self.multiplier).astype(output.dtype)
        return x + output


class FeedForward(nnx.Module):
    """The MLP between its two ends in the residual stream: of each token by itself.

    Attributes:
        stream: the way to the MLP and back.
        mlp: the MLP.
    """

    def __init__(self, stream: Stream, mlp: MLP):
        self.stream, self.mlp = stream, mlp

    def __call__(
        self, key: PRNGKeyArray | None, x: Float[Array, "B S E"], read: Float[Array, "B S E"] | None = None
    ) -> Float[Array, "B S E"]:
        """The residual stream with the MLP's output.

        Args:
            key: the layer's dropout key.
            x: the residual stream.
            read: the MLP's input; None: it reads the stream.
        """
        prepared = None
        if read is None:
            whole = self.mlp.float32 or self.mlp.why_not_fused(x.dtype) is not None
            x, read, prepared = self.stream.read(x, None if whole else self.mlp.gate_up, key)
        if self.stream.as_is:
            return self.mlp(read, key, x, prepared)
        return self.stream.added(x, self.mlp(read, key, None, prepared), key)
