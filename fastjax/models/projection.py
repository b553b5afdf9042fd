"""Projections and embeddings: the weights that adapters attach to."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fastjax.errors import ConfigError
from fastjax.lora.linear import project, split_parts
from fastjax.lora.params import BaseParam, Constant, LoraEmbedding, LoraLinear, SavedParam
from fastjax.lora.quantized import Quantizer, project_quantized
from fastjax.lora.token_rows import TrainableTokens
from fastjax.lora.units import WHOLE, row_slices
from fastjax.quantization import WeightLike, rows_of
from fastjax.quantization.float8 import FORWARD, in_float8

M = TypeVar("M", bound=nnx.Module)


class Projection(nnx.Module):
    """Matrix products of one input, y = x·Wᵀ + b, as one weight of several named parts, each with its own adapter.

    Attributes:
        parts: (name, output rows) of each part, from the top row down.
        weight: [out, in] in any format of `quantization.matmul`; of experts [X, out, in], which one unit multiplies
            with (`lora.experts`) in the place of a call.
        bias: [out], or None; of experts [X, out].
        adapters: by the part's name.
        float32: names of the parts computed in float32 whatever the input's dtype.
        tokens: trained rows in place of some of the weight's (of a head), or None.
        base_compute: which of the weight's products with bfloat16 are in float8 (`Precision.base_compute`); None: none.
        quantizer: a fake quantiser that weight and input go through, adapters merged; None: none.
        quantizing: whether it is in force, bool []; None: it is.
        output_tokens: which tokens its output has; devices that share the layer sum their products.
    """

    def __init__(
        self,
        parts: Sequence[tuple[str, int]],
        weight: WeightLike | nnx.Param,
        bias: Array | None = None,
        adapters: Mapping[str, LoraLinear] | None = None,
        float32: Collection[str] = (),
        tokens: TrainableTokens | None = None,
        base_compute: str | None = None,
    ):
        self.parts, self.base_compute = tuple(parts), base_compute
        self.weight = weight if isinstance(weight, nnx.Variable) else BaseParam(weight)
        self.bias = None if bias is None else BaseParam(bias)
        self.adapters = nnx.Dict(dict(adapters or {}))
        self.float32 = tuple(name for name, _ in parts if name in float32)
        self.tokens = tokens
        self.quantizer: Quantizer | None = None
        self.quantizing: Constant | None = None
        self.output_tokens = WHOLE

    @property
    def operand(self) -> WeightLike:
        """The weight as its products take it."""
        weight = self.weight.get_value()
        return weight if self.base_compute is None else in_float8(weight, FORWARD[self.base_compute])

    def __call__(
        self,
        x: Float[Array, "B S in"],
        key: PRNGKeyArray | None = None,
        *,
        dropped: Float[Array, "B S in"] | None = None,
        residual: Float[Array, "B S out"] | None = None,
    ) -> tuple[Float[Array, "B S out"], ...]:
        """The parts' outputs in the dtype of x.

        Args:
            x: the input.
            key: the layer's dropout key; None switches dropout off.
            dropped: the adapters' input, where the caller has drawn the dropout already.
            residual: added to the output of a projection of one part that is computed in the dtype of x.
        """
        outputs = []
        for here, out in zip(self._slices, self._products(x, key, dropped, residual), strict=True):
            if self.tokens is not None:
                out = self.tokens.score(x.astype(out.dtype), out)
            if self.bias is not None:
                out = out + self.bias[...][here].astype(out.dtype)[None, None, :]
            outputs.append(checkpoint_name(out.astype(x.dtype), "projection"))
        return tuple(outputs)

    def whole(self, x: Float[Array, "B S in"], key: PRNGKeyArray | None = None) -> Float[Array, "B S out"] | None:
        """The parts' outputs side by side in the dtype of x; None where these are computed in several dtypes.

        Args:
            x: the input.
            key: the layer's dropout key; None switches dropout off.
        """
        dtypes = set(self.dtypes(x.dtype))
        if len(dtypes) > 1:
            return None
        assert self.tokens is None, "trained rows belong to a head"
        out = self._unit(self.parts, self.operand, x.astype(dtypes.pop()), key, None)
        if self.bias is not None:
            out = out + self.bias[...].astype(out.dtype)[None, None, :]
        return out.astype(x.dtype)

    def dtypes(self, dtype: jnp.dtype) -> list[jnp.dtype]:
        """The dtype in which each part is computed, for an input's dtype."""
        return [jnp.dtype(jnp.float32) if name in self.float32 else jnp.dtype(dtype) for name, _ in self.parts]

    @property
    def _slices(self) -> list[slice]:
        return row_slices(rows for _, rows in self.parts)

    def _products(
        self, x: Array, key: PRNGKeyArray | None, dropped: Array | None, residual: Array | None
    ) -> list[Array]:
        """The parts' outputs without bias, each in its own dtype: one unit where all are equal."""
        weight, dtypes = self.operand, self.dtypes(x.dtype)
        if len(set(dtypes)) == 1:
            whole = self._unit(self.parts, weight, x.astype(dtypes[0]), key, dropped, residual)
            return list(split_parts(whole, self.parts))
        return [
            self._unit([size], rows_of(weight, here), x.astype(dtype), key, dropped)
            for size, here, dtype in zip(self.parts, self._slices, dtypes, strict=True)
        ]

    def _unit(
        self,
        sizes: Sequence[tuple[str, int]],
        weight: WeightLike,
        x: Array,
        key: PRNGKeyArray | None,
        dropped: Array | None,
        residual: Array | None = None,
    ) -> Array:
        """The outputs of some parts side by side without bias, in the dtype of x."""
        if self.quantizer is not None:
            quantizing = None if self.quantizing is None else self.quantizing[...]
            return project_quantized(self.quantizer, sizes, weight, self.adapters, x, residual, quantizing)
        drawn = None if dropped is None else dropped.astype(x.dtype)
        return project(sizes, weight, self.adapters, x, key, drawn, residual, self.output_tokens)


class Embedding(nnx.Module):
    """The table of token embeddings [V, E].

    Attributes:
        weight: the table.
        adapter: its adapter, or None.
        tokens: trained rows in place of some of the table's, or None.
        float32: whether the adapter is computed in float32 whatever the result's dtype.
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

    def __call__(
        self, tokens: Int[Array, "B S"], dtype: jnp.dtype, look_up: Callable[[Array, Array], Array]
    ) -> Float[Array, "B S E"]:
        """The tokens' embeddings in `dtype`.

        Args:
            tokens: token ids.
            dtype: of the result.
            look_up: (table, ids) -> its rows.
        """
        table = self.weight.get_value()
        out = look_up(table, tokens).astype(jnp.float32 if self.float32 else dtype)
        if self.adapter is not None:
            out = self.adapter(tokens, out, table)
        if self.tokens is not None:
            out = self.tokens.embed(tokens, out)
        return out.astype(dtype)


class Head(Projection):
    """The projection to logits.

    Attributes:
        scale: factor of the logits.
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


class ScoreHead(nnx.Module):
    """A reward model's projection to one score of each place, computed in float32 whatever the input's dtype.

    Attributes:
        weight: [1, E], float32.
    """

    def __init__(self, weight: Array | nnx.Param):
        self.weight = weight if isinstance(weight, nnx.Variable) else BaseParam(weight)

    def __call__(self, hidden: Float[Array, "B S E"]) -> Float[Array, "B S"]:
        """The scores of the decoder's hidden states."""
        weight = self.weight.get_value().astype(jnp.float32)
        return jnp.sum(hidden.astype(jnp.float32) * weight[None], axis=-1)  # no matrix product: TF32 would round it


def quantized_projections(module: nnx.Module) -> list[Projection]:
    """The projections in a module that go through a fake quantiser."""
    projections = (each for _, each in nnx.iter_modules(module) if isinstance(each, Projection))
    return [projection for projection in projections if projection.quantizer is not None]


def low_rank_adapters(module: nnx.Module) -> list[LoraLinear]:
    """The adapters of the projections in a module."""
    return [each for _, each in nnx.iter_modules(module) if isinstance(each, LoraLinear)]


def without_adapters(module: M, *, at_scale_zero: bool = False) -> M:
    """A copy of a module without low-rank adapters, trained rows and fake quantisers, over the same arrays: the base's.

    Args:
        module: a decoder or a part of one.
        at_scale_zero: leave the adapters there, but those with a magnitude (DoRA), and let them add nothing: numbers of
            the base by the products of the adapted model, since kernels add in another order with adapters and without.

    Raises:
        ConfigError: a table that is trained whole; the base's own is not held beside it.
    """
    graphdef, state = nnx.split(module)
    base = nnx.merge(graphdef, state)

    def stays(adapter: LoraLinear | LoraEmbedding | None) -> bool:
        if adapter is None or not at_scale_zero or adapter.magnitude is not None:
            return False
        adapter.scaling = 0.0
        return True

    for _, submodule in list(nnx.iter_modules(base)):
        if not isinstance(submodule, Projection | Embedding):
            continue
        if isinstance(submodule.weight, SavedParam):
            raise ConfigError(
                "adapters: expected true with modules_to_save, got false; the trained table is in the place of the "
                "base's: load the base by itself"
            )
        submodule.tokens = None
        if isinstance(submodule, Embedding):
            submodule.adapter = submodule.adapter if stays(submodule.adapter) else None
        else:
            submodule.adapters = nnx.Dict({name: one for name, one in submodule.adapters.items() if stays(one)})
            submodule.quantizer = None
    return base
