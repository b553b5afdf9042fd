"""Normalisations, in float32 inside."""

import functools
from collections.abc import Mapping

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
    """Root-mean-square normalisation (arXiv 1910.07467), or LayerNorm (arXiv 1607.06450).

    Attributes:
        weight: the scale of each feature, with two axes of each feature of each head; None: all are 1.
        bias: is added in the end, of the shape of the scale; None: nothing.
        kind: "rms" or "layer", which subtracts the mean first.
        eps: added to the mean square.
        offset: added to the scale.
        float32: whether the normalised values stay in float32 until they are scaled, whatever the input's dtype.
    """

    def __init__(
        self,
        config: ModelConfig,
        arrays: Mapping[str, Array],
        float32: bool = False,
        eps: float | None = None,
        offset: float | None = None,
    ):
        self.weight, self.bias = (BaseParam(arrays[leaf]) if leaf in arrays else None for leaf in ("weight", "bias"))
        self.kind, self.eps = config.norm, config.norm_eps if eps is None else eps
        self.offset = config.norm_offset if offset is None else offset
        self.float32 = float32 or config.norm_float32

    @property
    def plain(self) -> bool:
        """Whether it is a root-mean-square norm of the whole row in the input's dtype, with a scale and no bias."""
        scaled = self.weight is not None and self.weight[...].ndim == 1
        return self.kind == "rms" and scaled and self.bias is None and not self.float32

    def __call__(self, x: Float[Array, "*rows E"]) -> Float[Array, "*rows E"]:
        """Normalise the last axis: (x - mean, or x) / rms · (weight + offset) + bias."""
        inner = x.astype(jnp.float32) if self.float32 else x
        if self.kind == "layer":
            inner = inner - jnp.mean(inner, axis=-1, keepdims=True)
        if self.weight is not None and self.weight[...].ndim == 1:
            out = rms_norm(inner, self.weight[...], eps=self.eps, offset=self.offset)
        else:
            wide = inner.astype(jnp.float32)
            out = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
            if self.weight is not None:
                out = out * (_as_rows(self.weight[...], x.ndim) + self.offset)
        if self.bias is not None:
            out = out + _as_rows(self.bias[...], x.ndim).astype(out.dtype)
        return out.astype(x.dtype)

    def beside(self, x: Float[Array, "B S E"]) -> tuple[Float[Array, "B S E"], Float[Array, "B S E"]]:
        """The residual stream, to be read in its place, so that one pass makes its gradient; its normalised rows."""
        if self.weight is None or not self.plain:
            return x, self(x)
        op = functools.partial(rms_norm_in_stream, eps=self.eps, offset=self.offset)
        return local(op, in_specs=(ROWS, P()), out_specs=(ROWS, ROWS))(x, self.weight[...])


def _as_rows(array: Array, axes: int) -> Array:
    """An array of one row in float32, with leading axes up to a number."""
    return array.astype(jnp.float32).reshape((1,) * (axes - array.ndim) + array.shape)
