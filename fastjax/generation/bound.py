"""A decoder as the programs of generation take it: a list of arrays, and what is static with its hash.

A jitted function hashes its static arguments and sorts the keys of its trees at every call; for 32 unrolled layers with
adapters that took longer than a token of one row. And adapters that are trained in float32 are read in every token, as
are the scales of nested NF4: they are rounded and decoded before, once, as the products would do it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fastjax.execution.language_model import LanguageModel
from fastjax.lora.params import LoraParam
from fastjax.models.leaves import leaf_at
from fastjax.models.moe import Router
from fastjax.models.projection import Projection
from fastjax.quantization.weights import decoded_scales
from pallas_kernels.tiles import RANKS


@jax.tree_util.register_pytree_node_class
class BoundDecoder:
    """A decoder's arrays, as one argument of a jitted function."""

    def __init__(self, leaves: list[Any], static: "_Static"):
        self._leaves, self._static = leaves, static

    @classmethod
    def of(cls, model: LanguageModel) -> "BoundDecoder":
        """Bind a model's arrays: adapters in the dtype of the computation, scales decoded, all else as it is.

        Args:
            model: with or without an adapter.
        """
        model = _rounded(model)
        leaves, tree = jax.tree.flatten((model.trainable, decoded_scales(model.frozen)))
        return cls(leaves, _interned(_Static(model.graphdef, tree)))

    @property
    def graphdef(self) -> nnx.GraphDef:
        """The decoder's definition."""
        return self._static.graphdef

    @property
    def trees(self) -> tuple[Any, Any]:
        """The trained arrays and the frozen ones, as a `LanguageModel` has them."""
        return jax.tree.unflatten(self._static.tree, self._leaves)

    def tree_flatten(self) -> tuple[list[Any], "_Static"]:
        """The arrays, and what is static."""
        return self._leaves, self._static

    @classmethod
    def tree_unflatten(cls, static: "_Static", leaves: Any) -> "BoundDecoder":
        """The inverse of `tree_flatten`."""
        return cls(list(leaves), static)


def _rounded(model: LanguageModel) -> LanguageModel:
    """The model with A and s·B of its adapters in the dtype of the computation, where that is one of 16 bits.

    Those of large ranks and of experts stay as they are, since copies would take memory that matters; so do DoRA's,
    whose factors are made of them, and those that a quantised weight is made with.
    """
    if model.dtype == jnp.float32 or model.precision.float32_modules:
        return model
    decoder, found = model.module(), False
    for path, projection in nnx.iter_modules(decoder):
        if not isinstance(projection, Projection) or isinstance(projection, Router):
            continue
        if projection.quantizer is not None or leaf_at(path).of_experts:
            continue
        for adapter in projection.adapters.values():
            a, b = adapter.lora_A[...], adapter.lora_B[...]
            if adapter.magnitude is None and a.dtype == jnp.float32 and a.shape[-2] <= RANKS[-1]:
                adapter.lora_A = LoraParam(a.astype(model.dtype))
                adapter.lora_B = LoraParam((b.astype(jnp.float32) * adapter.scaling).astype(model.dtype))
                adapter.scaling, found = 1.0, True
    if not found:
        return model
    graphdef, trainable, frozen = nnx.split(decoder, model.trainable_filter, ...)
    return model.replace(graphdef=graphdef, trainable=nnx.to_pure_dict(trainable), frozen=nnx.to_pure_dict(frozen))


class _Static:
    """A definition and the tree of its arrays, hashed once."""

    def __init__(self, graphdef: nnx.GraphDef, tree: Any):
        self.graphdef, self.tree = graphdef, tree
        self._hash = hash((graphdef, tree))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, _Static) and (self.graphdef, self.tree) == (other.graphdef, other.tree)


@functools.lru_cache(maxsize=64)
def _interned(static: _Static) -> _Static:
    """The first of equal ones, which compares at once."""
    return static
