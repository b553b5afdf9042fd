"""Comparison of two model folders: names, shapes, dtypes, largest difference of each tensor, in little memory."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from convert.blocks import array_blocks, whole_groups
from convert.checkpoint import Checkpoint, open_checkpoint
from convert.derived import tensor_blocks
from convert.errors import ConvertError
from convert.formats import FLOATS, FORMATS
from convert.weights import Weights, open_weights

_LENGTH = 2**20
#: Of a scale and of the value that it gives, each rounded to bfloat16, over the largest magnitude.
_DECODED = 2 * 2.0**-9


@dataclass(frozen=True)
class Difference:
    """A tensor of both folders.

    Attributes:
        name: Its name in the checkpoint.
        shapes: In the first folder and the second.
        formats: Likewise: "bfloat16", "nf4", …
        largest: Largest difference of two elements; NaN where only one is NaN, None if the shapes differ.
        relative: 2-norm of the difference over that of the first folder's tensor.
        scale: Largest magnitude in the first folder's tensor.
    """

    name: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    formats: tuple[str, str]
    largest: float | None
    relative: float | None
    scale: float | None = None

    @property
    def rounding(self) -> float:
        """Largest difference, over the largest magnitude, that another format of 4 or 8 bits makes; 0 without one."""
        kinds = [FORMATS[name] for name in self.formats if name in FORMATS]
        found = sum(form.rounding for form in kinds) if self.formats[0] != self.formats[1] else 0.0
        return found and found + _DECODED

    @property
    def fits(self) -> bool:
        """Whether the tensors are equal, or differ by what another format of 4 or 8 bits rounds."""
        if self.largest is None or self.scale is None:
            return False
        return self.equal or (self.rounding > 0 and self.largest <= self.rounding * self.scale)

    @property
    def equal(self) -> bool:
        """Whether shape, format and values match."""
        return self.shapes[0] == self.shapes[1] and self.formats[0] == self.formats[1] and self.largest == 0


@dataclass(frozen=True)
class Comparison:
    """The differences of two folders.

    Attributes:
        missing: Names only in the first.
        added: Names only in the second.
        tensors: The common tensors.
    """

    missing: tuple[str, ...]
    added: tuple[str, ...]
    tensors: tuple[Difference, ...]

    @property
    def same_form(self) -> bool:
        """Whether names, shapes and formats match."""
        same = all(t.shapes[0] == t.shapes[1] and t.formats[0] == t.formats[1] for t in self.tensors)
        return same and not self.missing and not self.added

    @property
    def fits(self) -> bool:
        """Whether both have the same tensors, and each fits."""
        return not self.missing and not self.added and all(tensor.fits for tensor in self.tensors)

    @property
    def largest(self) -> float:
        """The largest difference of all tensors; NaN if any is."""
        found = [tensor.largest for tensor in self.tensors if tensor.largest is not None]
        return float(np.max(found)) if found else 0.0


def compare(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    *,
    monitor: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Compare two model folders tensor by tensor; packed weights by their decoded values.

    Args:
        first: A model folder.
        second: Another.
        monitor: Called with the tensors compared and in all.

    Returns:
        The differences. Without a table for the family (of either folder) tensors are compared as stored.

    Raises:
        ConvertError: A folder is damaged.
    """
    sides = [_Side(first), _Side(second)]
    if len({side.weights.family.mixture for side in sides if side.weights is not None}) == 2:
        for side in sides:
            side.by_path = True
    names = [side.names() for side in sides]
    both = [name for name in names[0] if name in names[1]]
    differences = []
    for number, name in enumerate(both):
        if monitor is not None:
            monitor(number, len(both))
        differences.append(_difference(name, *sides))
    if monitor is not None:
        monitor(len(both), len(both))
    missing = tuple(name for name in names[0] if name not in names[1])
    return Comparison(missing, tuple(name for name in names[1] if name not in names[0]), tuple(differences))


class _Side:
    """A folder read through its family's table, or as stored without one."""

    def __init__(self, folder: str | os.PathLike[str]):
        self.checkpoint: Checkpoint = open_checkpoint(Path(folder))
        self.weights: Weights | None = None
        try:
            self.weights = open_weights(folder)
        except ConvertError:
            pass
        self.by_path = False

    def names(self) -> list[str]:
        """Tensor names, without the scales of packed tensors; paths of weights with `by_path`."""
        if self.weights is None:
            return list(self.checkpoint.names)
        found = {tensor.name if tensor else name: tensor for name, tensor in self.weights.in_files()}
        if self.by_path:
            others = [name for name, tensor in found.items() if tensor is None]
            return sorted([*self.weights.specs, *others])
        return sorted(found)

    def shape(self, name: str) -> tuple[int, ...]:
        if self.weights is not None and self.by_path and name in self.weights.specs:
            return self.weights.specs[name].shape
        if self.weights is not None and name in self.weights.tensors:
            return self.weights.tensors[name].shape
        return self.checkpoint.info(name).shape

    def format(self, name: str) -> str:
        if self.weights is not None and self.by_path and name in self.weights.specs:
            return self.weights.format(name)
        if self.weights is not None and name in self.weights.tensors:
            return self.weights.tensor_format(name).name
        return self.checkpoint.info(name).dtype

    def values(self, name: str) -> Iterator[tuple[int, np.ndarray]]:
        """Consecutive flat float32 arrays of a fixed length."""
        if self.weights is not None and self.by_path and name in self.weights.specs:
            return _regular(self.weights.blocks(name)())
        if self.weights is not None and name in self.weights.tensors:
            return _regular(tensor_blocks(self.weights.tensors[name], self.weights.blocks)())
        info = self.checkpoint.info(name)
        if info.shape == () or info.dtype not in FLOATS:
            return iter([(0, self.checkpoint.read(name).astype(np.float64).reshape(-1))])
        return _regular(array_blocks(name, info))


def _regular(blocks: Iterable[np.ndarray]) -> Iterator[tuple[int, np.ndarray]]:
    """Blocks regrouped into arrays of 2²⁰ elements, except the last."""
    for first, values in whole_groups(blocks, _LENGTH):
        for start in range(0, values.size, _LENGTH):
            yield first + start, values[start : start + _LENGTH]


def _difference(name: str, first: _Side, second: _Side) -> Difference:
    shapes = first.shape(name), second.shape(name)
    formats = first.format(name), second.format(name)
    if shapes[0] != shapes[1]:
        return Difference(name, shapes, formats, None, None)
    largest, squares, of_first, scale = 0.0, 0.0, 0.0, 0.0
    for (_, one), (_, other) in zip(first.values(name), second.values(name), strict=True):
        same = (one == other) | (np.isnan(one) & np.isnan(other))
        with np.errstate(invalid="ignore", over="ignore"):
            gap = np.where(same, 0, np.abs(one - other))
        largest = float(np.maximum(largest, gap.max(initial=0)))
        scale = float(np.maximum(scale, np.abs(one).max(initial=0)))
        squares += float(np.square(gap, dtype=np.float64).sum())
        of_first += float(np.square(one, dtype=np.float64).sum())
    relative = 0.0 if squares == 0 else float(np.sqrt(squares / of_first)) if of_first else float("inf")
    return Difference(name, shapes, formats, largest, relative, scale)
