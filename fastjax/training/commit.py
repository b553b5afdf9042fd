"""The end of a step: the new state where its numbers are finite, else the old one.

XLA makes one kernel of results that read a common array, be it a scalar: of the moments of all layers, for example,
then of the weights of all layers. Such kernels read each gradient again, and where their results cannot lie in the
place of the old ones they are copied there. So the large arrays are written one weight after the other.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from fastjax.host_memory import in_host_memory

#: Elements from which an array is worth kernels of its own: the time of a launch, 3 µs, is that of 10 MB.
_LARGE = 2**20


def finite_or_kept(finite: Bool[Array, ""], updated: Any, state: Any) -> Any:
    """A state of the step.

    Args:
        finite: whether the step's loss and gradients are.
        updated: the new state; of its arrays in the host's memory the optimizer has kept what must not change.
        state: the old one.

    Returns:
        `updated` where finite, else `state`.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(updated)
    old = structure.flatten_up_to(state)
    groups: dict[Any, list[int]] = {}
    for index, (path, leaf) in enumerate(leaves):
        alone = leaf.size >= _LARGE and not in_host_memory(old[index])
        groups.setdefault(_weight(path) if alone else None, []).append(index)
    chosen: list[Any] = [None] * len(leaves)
    for weight, members in groups.items():
        for index in members:
            new = leaves[index][1]
            chosen[index] = new if in_host_memory(old[index]) else jnp.where(finite, new, old[index])
        if weight is not None:
            finite, *ordered = jax.lax.optimization_barrier((finite, *(chosen[index] for index in members)))
            for index, leaf in zip(members, ordered, strict=True):
                chosen[index] = leaf
    return structure.unflatten(chosen)


def _weight(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """The names in the tree of trained arrays, which an array shares with its moments in the optimizer's state."""
    return tuple(entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey))
