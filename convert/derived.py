"""Tensors of a folder that is derived from another: which they are, and their values out of those of the weights."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from convert.blocks import Block, Blocks
from convert.checkpoint import CONFIG
from convert.errors import unexpected
from convert.families import family_for
from convert.model.spec import APART, QUANTIZED
from convert.model.tensors import TensorSpec
from convert.weights import Weights

#: (path, number of an expert or None) -> values of a weight, in the tree's layout.
Values = Callable[[str, int | None], Blocks]


def derived_tensors(
    weights: Weights, *, apart: bool = False
) -> Iterator[tuple[str, TensorSpec | None, TensorSpec | None]]:
    """Names of a folder in the order of its files, with the model's tensors to write in their place.

    Args:
        weights: The folder.
        apart: Whether each expert gets tensors of its own, as packed ones need them.

    Yields:
        (name, the model's tensor of this name, a tensor to write); (name, None, None) for a name that is not the
        model's.

    Raises:
        ConvertError: The family's files have no tensors of single experts.
    """
    places: dict[str, list[TensorSpec]] = {}
    for tensor in (_apart(weights) if apart else weights.tensors).values():
        places.setdefault(tensor.weights[0].path, []).append(tensor)
    for name, tensor in weights.in_files():
        if tensor is None:
            yield name, None, None
        elif tensor.expert is not None:
            yield name, tensor, places[tensor.weights[0].path][tensor.expert]
        else:
            for spec in tensor.weights if apart else tensor.weights[:1]:
                for target in places[spec.path]:
                    yield name, tensor, target


def served_together(weights: Weights, *, apart: bool) -> dict[str, tuple[TensorSpec, ...]]:
    """Name of a matrix to write -> the matrices that servers hold as one with it, itself among them.

    Args:
        weights: The folder.
        apart: As for `derived_tensors`.
    """
    fused: dict[tuple[Any, ...], list[TensorSpec]] = {}
    for tensor in (_apart(weights) if apart else weights.tensors).values():
        spec = tensor.weights[0]
        if spec.kind in QUANTIZED:
            key = spec.path if spec.group is None else (spec.path.layer, spec.group, tensor.expert)
            fused.setdefault((key,), []).append(tensor)
    return {tensor.name: tuple(tensors) for tensors in fused.values() for tensor in tensors}


def _apart(weights: Weights) -> dict[str, TensorSpec]:
    config, file = weights.checkpoint.config, weights.checkpoint.folder / CONFIG
    family = family_for(config, file)
    if family.mixture is not None and family.mixture.layout != APART:
        expected = f"another format: {family.model_type} has no tensors of single experts, which 4 and 8 bits need"
        raise unexpected(file, "experts to quantise", expected, "a quantised one")
    return weights.family.tensors(config, file) if family.mixture is None else family.tensors(config, file)


def tensor_blocks(tensor: TensorSpec, values: Values) -> Blocks:
    """The values of a tensor, in the file's layout.

    Args:
        tensor: The tensor.
        values: Those of its weights.
    """
    spec = tensor.weights[0]
    if not tensor.shared:
        return values(spec.path, tensor.expert)

    def run() -> Iterator[Block]:
        for number in range(tensor.shape[0]):
            shares = [
                np.concatenate(list(values(part.path, number)())).reshape(1, *part.shape[1:]) for part in tensor.weights
            ]
            whole = tensor.join(shares)[0]
            yield np.ascontiguousarray(whole).reshape(len(whole), -1)

    return run
