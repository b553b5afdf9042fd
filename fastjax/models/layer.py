"""One layer of the decoder."""

from collections.abc import Collection, Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

from convert.model.config import ModelConfig
from convert.model.paths import WeightPath
from fastjax.lora.dropout import drop
from fastjax.lora.linear import describe, matrices_of
from fastjax.lora.norm import Scale, normed_products
from fastjax.lora.rank_products import drops
from fastjax.models.attention import Attention, Context, LayerCache, Sinks
from fastjax.models.layer_loop import Sums
from fastjax.models.layout import array_at
from fastjax.models.mlp import MLP
from fastjax.models.moe import Mixture, build_mixture
from fastjax.models.norms import Norm
from fastjax.models.projection import Projection


class DecoderLayer(nnx.Module):
    """One layer: x + attention(x), then x + mlp(x), or both at once; with normalisations before and after each.

    Attributes:
        self_attn: the attention.
        mlp: the MLP, or the mixture of experts.
        around_attention: names of the normalisations before and after the attention, which are attributes; or None.
        around_mlp: likewise.
        parallel: whether the MLP has the attention's input.
        multiplier: factor of both outputs.
    """

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        weights: Mapping[str, Any],
        adapters: Mapping[str, Any],
        float32: Collection[str] = (),
    ):
        layer, groups = config.layers[index], config.groups(index)

        def projection(name: str) -> Projection:
            group = groups[name]
            modules = {part: WeightPath(None, group.block, part, "") for part, _ in group.parts}
            own = {part: adapters[module] for part, module in modules.items() if module in adapters}
            wide = [part for part, module in modules.items() if module in float32]
            bias = array_at(weights, group.path.with_leaf("bias")) if group.bias else None
            return Projection(group.parts, array_at(weights, group.path), bias, own, wide)

        def norm(part: str, block: str = "") -> Norm:
            inside = weights[block] if block else weights
            return Norm(config, inside[part]["weight"], WeightPath(None, block, part, "") in float32)

        qk_norms = None if config.qk_norm is None else (norm("q_norm", "self_attn"), norm("k_norm", "self_attn"))
        self.around_attention, self.around_mlp = config.attention_norms, config.mlp_norms
        self.parallel, self.multiplier = config.parallel_block, config.residual_multiplier
        self.dropout = config.residual_dropout
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
        self, x: Float[Array, "B S E"], context: Context, key: PRNGKeyArray | None, cache: LayerCache | None
    ) -> tuple[Float[Array, "B S E"], LayerCache | None, Sums]:
        """The layer's output; the cache with this step's keys and values, if there is one; a router's sums."""
        before, after = self.around_attention
        attention = self.self_attn
        whole = attention.float32 or attention.why_not_fused(x.dtype) is not None or self.parallel
        x, read, products = self._read(before, x, None if whole else attention.qkv, key)
        if self._as_is(after):
            x, cache = attention(read, context, key, cache, x, products)
        else:
            attended, cache = attention(read, context, key, cache, None, products)
            x = x + self._added(after, drop(attended, key, "self_attn", self.dropout))
        before, after = self.around_mlp
        if isinstance(self.mlp, Mixture):
            output, sums = self.mlp(read if self.parallel else self._normed(before, x), key, context.mask)
            return x + self._added(after, drop(output, key, "mlp", self.dropout)), cache, sums
        whole = self.mlp.float32 or self.mlp.why_not_fused(x.dtype) is not None
        if not self.parallel:
            x, read, products = self._read(before, x, None if whole else self.mlp.gate_up, key)
        if self._as_is(after):
            return self.mlp(read, key, x, products), cache, {}
        output = self.mlp(read, key, None, products)
        return x + self._added(after, drop(output, key, "mlp", self.dropout)), cache, {}

    def _read(
        self, norm: str | None, x: Float[Array, "B S E"], projection: Projection | None, key: PRNGKeyArray | None
    ) -> tuple[Float[Array, "B S E"], Float[Array, "B S E"], Float[Array, "B S PR"] | None]:
        """The residual stream, to be read in its place; the normalised rows; a projection's rank products of them.

        Args:
            norm: its name, or None.
            x: the residual stream.
            projection: what reads the rows with its adapters; None: it makes its own rank products.
            key: the layer's dropout key.
        """
        if norm is None or projection is None or not projection.adapters:
            return x, self._normed(norm, x), None
        module, parts = getattr(self, norm), describe(projection.parts, projection.adapters)
        if not module.plain or drops(parts, key) or set(projection.dtypes(x.dtype)) != {x.dtype}:
            return x, module(x), None
        scale = Scale(module.eps, module.offset)
        return normed_products(scale, parts, x, module.weight[...], matrices_of(projection.adapters))

    def _as_is(self, after: str | None) -> bool:
        """Whether attention or MLP is added to the residual stream as it is, with the norm of that name behind it."""
        return after is None and self.multiplier == 1.0 and self.dropout == 0.0

    def _normed(self, name: str | None, x: Float[Array, "B S E"]) -> Float[Array, "B S E"]:
        return x if name is None else getattr(self, name)(x)

    def _added(self, norm: str | None, x: Float[Array, "B S E"]) -> Float[Array, "B S E"]:
        """The share of attention or MLP in the residual stream, from its output."""
        x = self._normed(norm, x)
        return x if self.multiplier == 1.0 else (x.astype(jnp.float32) * self.multiplier).astype(x.dtype)
