"""Tensors of a checkpoint, and the weights that they hold: one, an expert's share of one, or several together."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Shaped

from convert.model.spec import APART, INTERLEAVED, MERGED, WHOLE, WeightSpec


class TensorSpec(NamedTuple):
    """A tensor of a checkpoint.

    Attributes:
        name: its name.
        shape: its sizes, as values of 16 or 32 bits have them.
        weights: the weights in it; of several, gate before up.
        expert: the number of the expert whose share it is; None: all there is.
    """

    name: str
    shape: tuple[int, ...]
    weights: tuple[WeightSpec, ...]
    expert: int | None = None

    @property
    def layout(self) -> str:
        """How its weights lie in it, as in `WeightSpec`."""
        return self.weights[0].layout

    @property
    def shared(self) -> bool:
        """Whether it holds all experts."""
        return self.layout in (MERGED, INTERLEAVED)

    def share(self, spec: WeightSpec, values: Shaped[np.ndarray, "..."]) -> Shaped[np.ndarray, "..."]:
        """The part of one weight.

        Args:
            spec: one of `weights`.
            values: the tensor's, or those of some experts of it, with their axis.
        """
        number = self.weights.index(spec)
        if self.layout == MERGED:
            first = sum(other.shape[1] for other in self.weights[:number])
            return values[:, first : first + spec.shape[1]]
        if self.layout == INTERLEAVED:
            rows = values.swapaxes(1, 2) if values.ndim == 3 else values
            return rows[:, number :: len(self.weights)]
        return values

    def join(self, shares: Sequence[Shaped[np.ndarray, "..."]]) -> Shaped[np.ndarray, "..."]:
        """The inverse of `share`: values from the parts of all `weights`."""
        if self.layout == MERGED:
            return np.concatenate(shares, axis=1)
        if self.layout == INTERLEAVED:
            turns = np.stack(shares, axis=2)
            rows = turns.reshape(turns.shape[0], -1, *turns.shape[3:])
            return rows.swapaxes(1, 2) if rows.ndim == 3 else rows
        return shares[0]


def tensors_of(specs: Iterable[WeightSpec]) -> dict[str, TensorSpec]:
    """The tensors of a checkpoint with some weights, by name, in the order of the weights."""
    tensors: dict[str, TensorSpec] = {}
    for spec in specs:
        if spec.layout == WHOLE:
            tensors[spec.name] = TensorSpec(spec.name, spec.shape, (spec,))
        elif spec.layout == APART:
            for expert in range(spec.shape[0]):
                name = expert_name(spec, expert)
                tensors[name] = TensorSpec(name, spec.shape[1:], (spec,), expert)
        else:
            before = tensors[spec.name].weights if spec.name in tensors else ()
            tensors[spec.name] = _together((*before, spec))
    return tensors


def expert_name(spec: WeightSpec, expert: int) -> str:
    """The name of an expert's tensor, in the layout "apart"."""
    return spec.name.replace("{x}", str(expert))


def _together(weights: tuple[WeightSpec, ...]) -> TensorSpec:
    first = weights[0]
    experts, rows, *columns = first.shape
    rows = sum(spec.shape[1] for spec in weights)
    inner = (*columns, rows) if first.layout == INTERLEAVED else (rows, *columns)
    return TensorSpec(first.name, (experts, *inner), weights)
