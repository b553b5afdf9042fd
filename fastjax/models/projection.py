"""Projections and embeddings: the weights that adapters attach to."""

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fastjax.lora import BaseParam, LoraEmbedding, LoraLinear, drop
from fastjax.quantization import dense, matmul
from fastjax.quantization.weights import Weight
from pallas_kernels.rms_norm import rms_norm


class Projection(nnx.Module):
    """Matrix products of one input, y = x·Wᵀ + b, as one weight of several named parts, each with its own adapter.

    Attributes:
        parts: (name, output rows) of each part, from the top row down.
        weight: [out, in] in any format that `quantization.matmul` takes.
        bias: [out], or None.
        adapters: by the part's name.
    """

    def __init__(
        self,
        parts: Sequence[tuple[str, int]],
        weight: Weight | nnx.Param,
        bias: Array | None = None,
        adapters: Mapping[str, LoraLinear] | None = None,
    ):
        self.parts = tuple(parts)
        self.weight = weight if isinstance(weight, nnx.Variable) else BaseParam(weight)
        self.bias = None if bias is None else BaseParam(bias)
        self.adapters = nnx.Dict(dict(adapters or {}))

    def __call__(
        self,
        x: Float[Array, "B S in"],
        key: PRNGKeyArray | None = None,
        *,
        dropped: Float[Array, "B S in"] | None = None,
    ) -> tuple[Float[Array, "B S out"], ...]:
        """The parts' outputs in the dtype of x.

        Args:
            x: the input.
            key: the layer's dropout key; None switches dropout off.
            dropped: the adapters' input, where the caller has drawn the dropout already.
        """
        weight = self.weight.get_value()
        base, outputs, start = matmul(x, weight), [], 0
        for name, rows in self.parts:
            rows_here = slice(start, start + rows)
            out = base[..., rows_here]
            if name in self.adapters:
                adapter = self.adapters[name]
                out = adapter(
                    drop(x, key, name, adapter.dropout) if dropped is None else dropped,
                    out,
                    dense=lambda rows=rows_here: dense(weight, jnp.float32)[rows],
                    product=(lambda y, rows=rows_here: matmul(y, weight)[..., rows])
                    if dropped is not None or (key is not None and adapter.dropout)
                    else None,
                )
            if self.bias is not None:
                out = out + self.bias[...][rows_here].astype(x.dtype)[None, None, :]
            outputs.append(checkpoint_name(out, "projection"))
            start += rows
        return tuple(outputs)


class Embedding(nnx.Module):
    """The table of token embeddings [V, E], with an adapter or without."""

    def __init__(self, weight: Array | nnx.Param, adapter: LoraEmbedding | None = None):
        self.weight = weight if isinstance(weight, nnx.Variable) else BaseParam(weight)
        self.adapter = adapter

    def __call__(self, tokens: Int[Array, "B S"], dtype: jnp.dtype) -> Float[Array, "B S E"]:
        """The tokens' embeddings in `dtype`."""
        table = self.weight.get_value()
        out = jnp.take(table, tokens, axis=0).astype(dtype)
        return out if self.adapter is None else self.adapter(tokens, out, table)


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation with a learned scale [E]."""

    def __init__(self, weight: Array, eps: float):
        self.weight, self.eps = BaseParam(weight), eps

    def __call__(self, x: Float[Array, "B S E"]) -> Float[Array, "B S E"]:
        """Normalise: x / rms(x) · weight."""
        return rms_norm(x, self.weight[...], eps=self.eps)
