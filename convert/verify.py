"""Comparison of two model folders: names, shapes, dtypes, largest difference of each tensor, in little memory."""

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from convert.blocks import Blocks, array_blocks, whole_groups
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
        formats: In the first folder and the second: "bfloat16", "nf4", …
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
        rounding = sum(form.rounding for form in kinds) if self.formats[0] != self.formats[1] else 0.0
        return rounding and rounding + _DECODED

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
    def fits(self) -> bool:
        """Whether both have the same tensors, and each fits."""
        return not self.missing and not self.added and all(tensor.fits for tensor in self.tensors)

    @property
    def largest(self) -> float:
        """The largest difference of all tensors; NaN if any is."""
        differences = [tensor.largest for tensor in self.tensors if tensor.largest is not None]
        return float(np.max(differences)) if differences else 0.0


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
    opened = [(open_checkpoint(Path(folder)), _matched(folder)) for folder in (first, second)]
    by_path = len({weights.family.mixture for _, weights in opened if weights is not None}) == 2
    one, other = (_entries(checkpoint, weights, by_path=by_path) for checkpoint, weights in opened)
    both = [name for name in one if name in other]
    differences = []
    for number, name in enumerate(both):
        if monitor is not None:
            monitor(number, len(both))
        differences.append(_difference(name, one[name], other[name]))
    if monitor is not None:
        monitor(len(both), len(both))
    missing = tuple(name for name in one if name not in other)
    return Comparison(missing, tuple(name for name in other if name not in one), tuple(differences))


class _Entry(NamedTuple):
    """A tensor of one folder: its shape, its format, and its values as consecutive flat arrays of a fixed length."""

    shape: tuple[int, ...]
    format: str
    values: Callable[[], Iterator[np.ndarray]]


def _matched(folder: str | os.PathLike[str]) -> Weights | None:
    """A folder through its family's table; None without one."""
    try:
        return open_weights(folder)
    except ConvertError:
        return None


def _entries(checkpoint: Checkpoint, weights: Weights | None, *, by_path: bool) -> dict[str, _Entry]:
    """The tensors of a folder by name, without the scales of packed ones; of the model's by path with `by_path`."""
    if weights is None:
        return {name: _as_stored(checkpoint, name) for name in checkpoint.names}
    entries = {}
    for name, tensor in weights.in_files():
        if tensor is None:
            entries[name] = _as_stored(checkpoint, name)
        elif not by_path:
            values = functools.partial(_regular, tensor_blocks(tensor, weights.blocks))
            entries[tensor.name] = _Entry(tensor.shape, weights.tensor_format(tensor.name).name, values)
    for path, spec in weights.specs.items() if by_path else ():
        entries[path] = _Entry(spec.shape, weights.format(path), functools.partial(_regular, weights.blocks(path)))
    return dict(sorted(entries.items()))


def _as_stored(checkpoint: Checkpoint, name: str) -> _Entry:
    info = checkpoint.info(name)
    if info.shape == () or info.dtype not in FLOATS:
        return _Entry(info.shape, info.dtype, lambda: iter([checkpoint.read(name).astype(np.float64).reshape(-1)]))
    return _Entry(info.shape, info.dtype, functools.partial(_regular, lambda: array_blocks(name, info)))


def _regular(blocks: Blocks) -> Iterator[np.ndarray]:
    """Blocks regrouped into arrays of 2²⁰ elements, except the last."""
    for _, values in whole_groups(blocks(), _LENGTH):
        for start in range(0, values.size, _LENGTH):
            yield values[start : start + _LENGTH]


def _difference(name: str, first: _Entry, second: _Entry) -> Difference:
    shapes, formats = (first.shape, second.shape), (first.format, second.format)
    if shapes[0] != shapes[1]:
        return Difference(name, shapes, formats, None, None)
    largest, squares, of_first, scale = 0.0, 0.0, 0.0, 0.0
    for one, other in zip(first.values(), second.values(), strict=True):
        same = (one == other) | (np.isnan(one) & np.isnan(other))
        with np.errstate(invalid="ignore", over="ignore"):
            gap = np.where(same, 0, np.abs(one - other))
        largest = float(np.maximum(largest, gap.max(initial=0)))
        scale = float(np.maximum(scale, np.abs(one).max(initial=0)))
        squares += float(np.square(gap, dtype=np.float64).sum())
        of_first += float(np.square(one, dtype=np.float64).sum())
    relative = 0.0 if squares == 0 else float(np.sqrt(squares / of_first)) if of_first else float("inf")
    return Difference(name, shapes, formats, largest, relative, scale)
