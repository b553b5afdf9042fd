"""A decoder as the programs of generation take it: a list of arrays, and what is static with its hash.

A jitted function hashes its static arguments and sorts the keys of its trees at every call; for 32 unrolled layers with
adapters that took longer than a token of one row.
"""

import functools
from typing import Any

import jax
from flax import nnx

from fastjax.execution.language_model import LanguageModel


@jax.tree_util.register_pytree_node_class
class BoundDecoder:
    """A decoder's arrays, as one argument of a jitted function."""

    def __init__(self, leaves: list[Any], static: "_Static"):
        self._leaves, self._static = leaves, static

    @classmethod
    def of(cls, model: LanguageModel) -> "BoundDecoder":
        """Bind a model's arrays as they are.

        Args:
            model: with or without an adapter.
        """
        leaves, tree = jax.tree.flatten((model.trainable, model.frozen))
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
