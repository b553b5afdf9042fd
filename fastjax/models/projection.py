"""Projections and embeddings: the weights that adapters attach to."""

from collections.abc import Collection, Mapping, Sequence

import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fastjax.lora import BaseParam, LoraEmbedding, LoraLinear, drop
from fastjax.quantization import dense, matmul, part
from fastjax.quantization.weights import Weight
from fastjax.trainable_tokens import TrainableTokens


class Projection(nnx.Module):
    """Matrix products of one input, y = x·Wᵀ + b, as one weight of several named parts, each with its own adapter.

    Attributes:
        parts: (name, output rows) of each part, from the top row down.
        weight: [out, in] in any format that `quantization.matmul` takes.
        bias: [out], or None.
        adapters: by the part's name.
        float32: names of the parts that are computed in float32 whatever the input's dtype.
        tokens: trained rows in the place of some of the weight's (of a head), or None.
    """

    def __init__(
        self,
        parts: Sequence[tuple[str, int]],
        weight: Weight | nnx.Param,
        bias: Array | None = None,
        adapters: Mapping[str, LoraLinear] | None = None,
        float32: Collection[str] = (),
        tokens: TrainableTokens | None = None,
    ):
        self.parts = tuple(parts)
        self.weight = weight if isinstance(weight, nnx.Variable) else BaseParam(weight)
        self.bias = None if bias is None else BaseParam(bias)
        self.adapters = nnx.Dict(dict(adapters or {}))
        self.float32 = tuple(name for name, _ in parts if name in float32)
        self.tokens = tokens

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
        dtypes = [jnp.dtype(jnp.float32) if name in self.float32 else x.dtype for name, _ in self.parts]
        whole = matmul(x.astype(dtypes[0]), weight) if len(set(dtypes)) == 1 else None
        outputs, start = [], 0
        for index, ((name, rows), dtype) in enumerate(zip(self.parts, dtypes, strict=True)):
            here = slice(start, start + rows)

            def product(y: Array, index: int = index, here: slice = here) -> Array:
                if whole is None:
                    return matmul(y, part(weight, index, here))
                return matmul(y, weight)[..., here]

            out = product(x.astype(dtype)) if whole is None else whole[..., here]
            if name in self.adapters:
                adapter = self.adapters[name]
                out = adapter(
                    (drop(x, key, name, adapter.dropout) if dropped is None else dropped).astype(dtype),
                    out,
                    dense=lambda here=here: dense(weight, jnp.float32)[here],
                    product=product if dropped is not None or (key is not None and adapter.dropout) else None,
                )
            if self.tokens is not None:
                out = self.tokens.score(x.astype(dtype), out)
            if self.bias is not None:
                out = out + self.bias[...][here].astype(dtype)[None, None, :]
            outputs.append(checkpoint_name(out.astype(x.dtype), "projection"))
            start += rows
        return tuple(outputs)


class Embedding(nnx.Module):
    """The table of token embeddings [V, E].

    Attributes:
        weight: the table.
        adapter: its adapter, or None.
        tokens: trained rows in the place of some of the table's, or None.
        float32: whether the adapter is computed in float32 whatever the dtype asked for.
    """

    def __init__(
        self,
        weight: Array | nnx.Param,
        adapter: LoraEmbedding | None = None,
        tokens: TrainableTokens | None = None,
        float32: bool = False,
    ):
        self.weight = weight if isinstance(weight, nnx.Variable) else BaseParam(weight)
        self.adapter, self.tokens, self.float32 = adapter, tokens, float32

    def __call__(self, tokens: Int[Array, "B S"], dtype: jnp.dtype) -> Float[Array, "B S E"]:
        """The tokens' embeddings in `dtype`."""
        table = self.weight.get_value()
        out = jnp.take(table, tokens, axis=0).astype(jnp.float32 if self.float32 else dtype)
        if self.adapter is not None:
            out = self.adapter(tokens, out, table)
        if self.tokens is not None:
            out = self.tokens.embed(tokens, out)
        return out.astype(dtype)


class Head(Projection):
    """The projection to logits.

    Attributes:
        scale: what the logits are multiplied with.
        soft_cap: then they become cap · tanh(logits / cap); None: they stay.
    """

    def __init__(self, *args, scale: float, soft_cap: float | None, **options):
        super().__init__(*args, **options)
        self.scale, self.soft_cap = scale, soft_cap

    def finish(self, logits: Float[Array, "B S V"]) -> Float[Array, "B S V"]:
        """Scale and cap, in float32 and rounded once."""
        if self.scale == 1.0 and self.soft_cap is None:
            return logits
        wide = logits.astype(jnp.float32) * self.scale
        if self.soft_cap is not None:
            wide = self.soft_cap * jnp.tanh(wide / self.soft_cap)
        return wide.astype(logits.dtype)
