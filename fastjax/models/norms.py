"""Normalisations with a learned scale, in float32 inside."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from convert.model.config import ModelConfig
from fastjax.lora.params import BaseParam
from fastjax.parallel import ROWS, local
from pallas_kernels.rms_norm import rms_norm, rms_norm_in_stream


class Norm(nnx.Module):
    """Root-mean-square normalisation (arXiv 1910.07467), or LayerNorm without a bias (arXiv 1607.06450).

    Attributes:
        weight: the scale of each feature; with two axes of each feature of each head.
        kind: "rms" or "layer", which subtracts the mean first.
        eps: added to the mean square.
        offset: added to the scale.
        float32: whether the normalised values stay in float32 until they are scaled, whatever the input's dtype.
    """

    def __init__(self, config: ModelConfig, weight: Array, float32: bool = False):
        self.weight = BaseParam(weight)
        self.kind, self.eps, self.offset = config.norm, config.norm_eps, config.norm_offset
        self.float32 = float32 or config.norm_float32

    @property
    def plain(self) -> bool:
        """Whether it is a root-mean-square norm of the whole row in the input's dtype."""
        return self.kind == "rms" and not self.float32 and self.weight[...].ndim == 1

    def __call__(self, x: Float[Array, "*rows E"]) -> Float[Array, "*rows E"]:
        """Normalise the last axis: (x - mean, or x) / rms · (weight + offset)."""
        weight = self.weight[...]
        inner = x.astype(jnp.float32) if self.float32 else x
        if self.kind == "layer":
            inner = inner - jnp.mean(inner, axis=-1, keepdims=True)
        if weight.ndim == 1:
            return rms_norm(inner, weight, eps=self.eps, offset=self.offset).astype(x.dtype)
        square = jnp.mean(inner * inner, axis=-1, keepdims=True)
        scale = (weight.astype(jnp.float32) + self.offset)[None, None]
        return (inner * jax.lax.rsqrt(square + self.eps) * scale).astype(x.dtype)

    def beside(self, x: Float[Array, "B S E"]) -> tuple[Float[Array, "B S E"], Float[Array, "B S E"]]:
        """The residual stream, to be read in its place, so that one pass makes its gradient; its normalised rows."""
        if not self.plain:
            return x, self(x)
        op = functools.partial(rms_norm_in_stream, eps=self.eps, offset=self.offset)
        return local(op, in_specs=(ROWS, P()), out_specs=(ROWS, ROWS))(x, self.weight[...])
