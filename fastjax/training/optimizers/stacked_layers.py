"""Small arrays of layers that are called one by one, stacked for the time of an update.

Layers that a step unrolls have arrays of their own: adapters of Llama 3 8B on seven projections
are 448. An update of each by itself is some forty instructions, and all of them take XLA half as long to compile as the
layers do. So the arrays that differ in their layer's number alone are one stack for the optimizer, as those of scanned
layers are: its rules know stacks (`groups.stack_dims`), and its moments stay stacked between the steps.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fastjax.models.leaves import leaf_at

#: Elements from which an array is by itself: its copy into a stack would count, and there are few.
LARGE = 2**20


def _joined(arrays: list[Any]) -> jax.Array:
    # The barriers keep XLA from a kernel for each array and reader, with other offsets and so compiled anew.
    return jax.lax.optimization_barrier(jnp.stack(arrays))


class StackedLayers:
    """Which arrays of a trained tree are stacked.

    A stack has the place of its first array; those of the others hold None.
    """

    def __init__(self, tree: Any):
        """Find them: arrays of one shape and dtype at the same place of several layers.

        Args:
            tree: the trained arrays of a decoder, or their shapes.
        """
        leaves, self._structure = jax.tree_util.tree_flatten_with_path(tree)
        groups: dict[Any, list[int]] = {}
        for index, (path, array) in enumerate(leaves):
            leaf = leaf_at(path)
            alone = leaf.stack is None or array.size >= LARGE
            kind = index if alone else (leaf.position, leaf.keys, array.shape, array.dtype)
            groups.setdefault(kind, []).append(index)
        self._groups = list(groups.values())

    def stacked(self, tree: Any, join: Callable[[list[Any]], Any] = _joined) -> Any:
        """A tree with the stacks.

        Args:
            tree: of the structure that this was made of, but for what is below the arrays' places.
            join: makes a stack; [n, *shape] of n arrays.
        """
        leaves = self._structure.flatten_up_to(tree)
        stacks: list[Any] = [None] * len(leaves)
        for first, *others in self._groups:
            stacks[first] = join([leaves[index] for index in (first, *others)]) if others else leaves[first]
        return self._structure.unflatten(stacks)

    def apart(self, stacked: Any) -> Any:
        """The tree of arrays that `stacked` was given.

        Args:
            stacked: its stacks may be other arrays, [n, …].
        """
        arrays = self._structure.flatten_up_to(stacked)
        # As data the numbers leave all layers one kernel; as constants each would have its own.
        most = max(map(len, self._groups), default=0)
        numbers = jax.lax.optimization_barrier([jnp.int32(number) for number in range(most)])
        for group in self._groups:
            if len(group) > 1:
                stack = jax.lax.optimization_barrier(arrays[group[0]])
                for number, index in zip(numbers, group, strict=False):
                    arrays[index] = jax.lax.dynamic_index_in_dim(
                        stack, number, keepdims=False, allow_negative_indices=False
                    )
        return self._structure.unflatten(arrays)

    def vectors(self, function: Callable[[Any, Any], jax.Array], tree: Any) -> jax.Array:
        """A vector of each array, computed for a stack at once, behind one another in the order of the arrays.

        Args:
            function: (path, array) -> vector; of a stack with its first array's path.
            tree: arrays of the structure that this was made of.
        """
        leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
        by_group, owners = [], []
        for group in self._groups:
            vector_of = functools.partial(function, leaves[group[0]][0])
            arrays = [leaves[index][1] for index in group]
            by_group.append(jax.vmap(vector_of)(_joined(arrays)) if len(group) > 1 else vector_of(*arrays)[None])
            owners += [index for index in group for _ in range(by_group[-1].shape[1])]
        joined = jnp.concatenate([vectors.reshape(-1) for vectors in by_group])
        return joined if owners == sorted(owners) else joined[np.argsort(owners, kind="stable")]
