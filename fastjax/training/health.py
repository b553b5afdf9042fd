"""Gradient checks: norms by leaf and layer, and the rows that break a step.

No loss curve shows a weight without gradient. Norms are taken per layer, because a stacked array hides a dead layer
behind its neighbours. Where an adapter starts with one half at zero, the other half has no gradient until the first
half has moved; so the leaves are judged after a step with a learning rate above zero.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from convert.model.paths import WeightPath
from fastjax.data.batches import Batch
from fastjax.errors import TrainingError
from fastjax.models.layout import LayerStack
from fastjax.models.leaves import LORA_A, LORA_B, leaf_at
from fastjax.training.loop import Loop, Observer, Step
from fastjax.training.optimizers.stacked_layers import StackedLayers


def leaf_names(trainable: Any, plan: Sequence[LayerStack]) -> list[str]:
    """A name for each leaf, and for each layer of a stacked one, in the order of `squared_norms`.

    Args:
        trainable: the trained arrays of a decoder, or their shapes.
        plan: the arrangement of its layers.

    Returns:
        Names such as `layers.7.self_attn.qkv.adapters.q_proj.lora_A`.
    """
    names = []
    for path, _ in jax.tree_util.tree_flatten_with_path(trainable)[0]:
        leaf = leaf_at(path)
        if leaf.stack is None or leaf.position is None:
            names.append(leaf.name)
        else:
            run = plan[leaf.stack]
            layers = [run.start + leaf.position + n * run.period for n in range(run.count)]
            names += [leaf.in_layer(layer) for layer in layers]
    return names


def squared_norms(tree: Any, plan: Sequence[LayerStack]) -> Float[Array, " n"]:
    """Squared Euclidean norm of each leaf, of a stacked one by layer, in float32.

    Args:
        tree: arrays arranged as the trained ones.
        plan: the arrangement of the layers.
    """

    def norms(path: tuple[Any, ...], leaf: Array) -> Array:
        stack = leaf_at(path).stack
        rows = leaf.reshape(1 if stack is None else plan[stack].count, -1).astype(jnp.float32)
        return jnp.sum(jnp.square(rows), axis=1)

    return StackedLayers(tree).vectors(norms, tree)


class GradientCheck(Observer):
    """Checks the first steps' gradients until every leaf is judged."""

    def __init__(self, names: Sequence[str], may_be_zero: Callable[[str], bool] = lambda name: False):
        """Start with every leaf unjudged.

        Args:
            names: of the norms, from `leaf_names`.
            may_be_zero: whether a leaf may go without gradient (rows of tokens that no batch has shown yet).
        """
        self._names, self._may_be_zero = names, may_be_zero
        self._largest = np.zeros(len(names), np.float32)
        self._moved = False
        self.done = False

    def measured(self, loop: Loop, step: Step) -> None:
        """Record a step, if it is finite; see `step`."""
        if step.finite:
            rate = float(step.values.get("learning_rate", np.nan))
            self.step(step.values["squared_norms"], rate, last=step.number == loop.cadence.total)

    def step(self, norms: np.ndarray, learning_rate: float, *, last: bool) -> None:
        """Record a finite step.

        Args:
            norms: squared norms by leaf, float32 [n].
            learning_rate: the step's.
            last: no other step follows.

        Raises:
            TrainingError: leaves without gradient, by name.
        """
        if self.done:
            return
        self._largest = np.maximum(self._largest, norms)
        if self._moved or last:
            self.done = True
            dead = [
                name
                for name, norm in zip(self._names, self._largest, strict=True)
                if not norm > 0 and not self._may_be_zero(name) and (self._moved or not _half(name))
            ]
            if dead:
                shown = ", ".join(dead[:10]) + (f" and {len(dead) - 10} more" if len(dead) > 10 else "")
                raise TrainingError(
                    f"{len(dead)} of {len(self._names)} trained weights have no gradient after the first steps: "
                    f"{shown}. They would never change: leave them out of what is trained, or look for what cuts them "
                    "off from the loss"
                )
        self._moved = self._moved or learning_rate > 0


def _half(name: str) -> bool:
    """Whether a leaf is one half of a product whose other half may be zero."""
    return WeightPath.parse(name).leaf in LORA_A | LORA_B


def non_finite_rows(probe: Callable[[Batch], Any], batch: Batch) -> list[tuple[int, int]]:
    """Find the rows that break a step by running each alone.

    Args:
        probe: loss and gradient norm of a batch of one row, [1, 1, S], with the weights of the step.
        batch: of the step, [A, B, S].

    Returns:
        (microbatch, row) of each row whose loss or gradient is not finite.
    """
    broken = []
    for index in np.ndindex(*np.shape(batch.tokens)[:2]):
        row = jax.tree.map(lambda array, index=index: np.asarray(array)[index][None, None], batch)
        if not np.all(np.isfinite(np.asarray(jax.device_get(probe(row)), np.float64))):
            broken.append((int(index[0]), int(index[1])))
    return broken
