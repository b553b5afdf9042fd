"""The stream: a model folder as (tree path, array or packed tensor), one after the other, and the way back to a folder.

The family's table says which tensors there are and under what names, `convert.formats` what each is stored in.
"""

import functools
import itertools
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.blocks import Blocks, in_blocks
from convert.checkpoint import (
    CONFIG,
    Checkpoint,
    open_checkpoint,
)
from convert.errors import ConvertError, listed, unexpected
from convert.families import Family, Ignored, family_for
from convert.formats import FLOATS, FORMATS, Format, StackedTensor, Stored, format_of
from convert.formats.declared import check_quantization
from convert.model.paths import WeightPath
from convert.model.spec import APART, WHOLE, WeightSpec
from convert.model.tensors import TensorSpec, expert_name, tensors_of
from convert.read_ahead import read_ahead


@dataclass(frozen=True)
class Weights:
    """A model folder matched against its family's table.

    Attributes:
        checkpoint: The open folder.
        family: Its table.
        specs: Tree path -> weight, in the order of the stream.
        tensors: Name in the checkpoint -> tensor, with the weights in it.
    """

    checkpoint: Checkpoint
    family: Family
    specs: Mapping[str, WeightSpec]
    tensors: Mapping[str, TensorSpec]

    def format(self, path: str) -> str:
        """The name of a weight's format in `convert.formats.FORMATS`; nothing is read."""
        return self.tensor_format(self._first(path)).name

    def formats(self) -> list[Format]:
        """The formats of all weights, in the order of `FORMATS`."""
        names = {self.format(path) for path in self.specs}
        return [form for name, form in FORMATS.items() if name in names]

    def decoded_dtype(self, path: str) -> np.dtype:
        """The dtype of a weight's values: float32, bfloat16 or float16."""
        return self.tensor_dtype(self._first(path))

    def tensor_format(self, name: str) -> Format:
        """The format of a tensor, by its name in the checkpoint; nothing is read."""
        form = format_of(self._stored(name))
        assert form is not None, "formats are checked when a folder is opened"
        return form

    def scheme(self, name: str) -> str:
        """The entry of `convert.formats.WRITERS` that writes a tensor as it is stored; its format without one."""
        return self.tensor_format(name).scheme(self._stored(name))

    def tensor_dtype(self, name: str) -> np.dtype:
        """The dtype of a tensor's values: float32, bfloat16 or float16."""
        return self.tensor_format(name).decoded_dtype(self._stored(name))

    def stored_names(self, name: str) -> list[str]:
        """The names of a tensor's parts in the checkpoint: its values or codes, and its scales."""
        return [part for part in self.tensor_format(name).claims(name) if part in self.checkpoint.tensors]

    def in_files(self) -> Iterator[tuple[str, TensorSpec | None]]:
        """Names of the checkpoint in the order of its files, scales left out; with the model's tensor, if it is one."""
        tensors, beside = {}, set()
        for name, tensor in self.tensors.items():
            tensors[self.tensor_format(name).codes_name(name)] = tensor
            beside.update(self.stored_names(name))
        for name in self.checkpoint.tensors:
            if name in tensors or name not in beside:
                yield name, tensors.get(name)

    def ignored(self, name: str) -> Ignored | None:
        """The rule that ignores a name of the checkpoint, or None."""
        return self.family.ignores(name, self.checkpoint.config, self.checkpoint.folder / CONFIG)

    def read(self, path: str, *, packed: bool | None = None) -> Any:
        """Read one weight by its tree path, in the tree's layout.

        Args:
            path: Its path.
            packed: Whether a packed one is returned as it is stored and not decoded; None: where its format is
                writable.

        Returns:
            An array, or for a packed weight an instance of its format's class; of experts that are packed one by one a
            `StackedTensor`.

        Raises:
            ConvertError: A file was cut short, or the parts of a packed tensor do not fit together.
        """
        spec, name = self.specs[path], self._first(path)
        form = self.tensor_format(name)
        packed = form.writable if packed is None else packed
        if self.tensors[name].shared:
            return self._read_share(form, self.tensors[name], spec, packed)
        if spec.layout == APART:
            parts = (form.read(self._stored(expert_name(spec, number))) for number in range(spec.shape[0]))
            if packed and not form.plain:
                return StackedTensor(tuple(parts))
            return np.stack([form.decode(part) for part in parts])
        tensor = form.read(self._stored(name))
        return tensor if packed else form.decode(tensor)

    def stream(self, *, packed: bool | None = None, ahead: int = 0) -> Iterator[tuple[WeightPath, Any]]:
        """All weights in the model's order; as `stream`.

        Args:
            packed: as in `read`.
            ahead: bytes, once decoded, that threads may read before their turn comes; 0: each is read when it does.
        """
        _check_copies(self)
        sizes = (math.prod(spec.shape) * self.decoded_dtype(path).itemsize for path, spec in self.specs.items())
        reads = (functools.partial(self.read, path, packed=packed) for path in self.specs)
        tensors = read_ahead(zip(sizes, reads, strict=True), ahead) if ahead else (read() for read in reads)
        yield from zip((spec.path for spec in self.specs.values()), tensors, strict=True)

    def blocks(self, path: str, expert: int | None = None) -> Blocks:
        """A weight's values as blocks, rounded to the dtype that they decode to, in the tree's layout.

        Args:
            path: Its path.
            expert: Of a mixture's weight, the number of the expert; None: all, one after the other.
        """
        spec, name = self.specs[path], self._first(path)
        if spec.layout == WHOLE:
            form, stored = self.tensor_format(name), self._stored(name)
            return lambda: form.blocks(stored)
        if expert is None:
            every = [self.blocks(path, number) for number in range(spec.shape[0])]
            return lambda: itertools.chain.from_iterable(blocks() for blocks in every)
        if spec.layout == APART:
            name = expert_name(spec, expert)
            form, stored = self.tensor_format(name), self._stored(name)
            return lambda: form.blocks(stored)
        tensor, form = self.tensors[name], self.tensor_format(name)
        return lambda: in_blocks(tensor.share(spec, form.expert(self._stored(name), expert)[None])[0])

    def _read_share(self, form: Format, tensor: TensorSpec, spec: WeightSpec, packed: bool) -> Any:
        """A weight out of a tensor with all experts of several."""
        stored = self._stored(tensor.name)
        if packed and not form.plain:
            return form.read(stored).turns(tensor.weights.index(spec), len(tensor.weights))
        result = np.empty(spec.shape, form.decoded_dtype(stored))
        for number in range(spec.shape[0]):  # an expert at a time: the tensor may be large
            result[number] = tensor.share(spec, form.expert(stored, number)[None])[0]
        return result

    def _stored(self, name: str) -> Stored:
        return Stored(self.checkpoint, name, self.tensors[name].shape)

    def _first(self, path: str) -> str:
        """The name of a weight's tensor, or of its first expert's."""
        return expert_name(self.specs[path], 0)


def open_weights(folder: str | os.PathLike[str]) -> Weights:
    """Open a folder and match every name in it against the family's table; no tensor is read.

    Args:
        folder: A Hugging Face model folder: 16 or 32 bits, bitsandbytes NF4, or FP8.

    Returns:
        The matched folder.

    Raises:
        ConvertError: The folder is damaged, or as `match_weights`.
    """
    return match_weights(open_checkpoint(folder))


def match_weights(checkpoint: Checkpoint) -> Weights:
    """Match every name of an open folder against the family's table; no tensor is read.

    Args:
        checkpoint: The open folder.

    Raises:
        ConvertError: Its family or quantisation is not supported, or names are left over, missing or of another shape
            or dtype: then one message lists all of them.
    """
    file = checkpoint.folder / CONFIG
    check_quantization(checkpoint.config, file)
    family = family_for(checkpoint.config, file).named_as(checkpoint.names)
    specs: dict[str, WeightSpec] = {spec.path: spec for spec in family.specs(checkpoint.config, file)}
    _check_experts(checkpoint, specs)
    weights = Weights(checkpoint, family, specs, tensors_of(specs.values()))
    _check_names(weights)
    return weights


def stream(folder: str | os.PathLike[str], *, packed: bool | None = None) -> Iterator[tuple[WeightPath, Any]]:
    """A model's tensors in the order embeddings, layer 0 … layer L-1, norm, head, each read when its turn comes.

    Args:
        folder: A Hugging Face model folder.
        packed: As in `Weights.read`.

    Yields:
        (tree path, array or packed tensor); without a head if it is tied.

    Raises:
        ConvertError: As `open_weights` and `Weights.read`; names are checked before the first tensor.
    """
    yield from open_weights(folder).stream(packed=packed)


def _check_experts(checkpoint: Checkpoint, specs: Mapping[str, WeightSpec]) -> None:
    """Refuse more experts than tensors, before anything is made for each expert."""
    for spec in specs.values():
        if spec.layout == APART and spec.shape[0] > len(checkpoint.tensors):
            expected = f"at most {len(checkpoint.tensors)}, as there are no more tensors beside it"
            raise unexpected(checkpoint.folder / CONFIG, "number of experts", expected, spec.shape[0])


def _check_names(weights: Weights) -> None:
    """Every name has a row and every row a tensor of its shape and a float dtype, or one error lists the others."""
    checkpoint, family = weights.checkpoint, weights.family
    claimed: set[str] = set()
    missing: list[str] = []
    wrong: list[str] = []
    formats: dict[str, Format] = {}
    for tensor in weights.tensors.values():
        stored = Stored(checkpoint, tensor.name, tensor.shape)
        form = format_of(stored)
        if form is None and tensor.name not in checkpoint.tensors:
            missing.append(tensor.name)
            continue
        claimed.update([tensor.name] if form is None else form.claims(tensor.name))
        if form is None or (tensor.shared and not form.shared_experts):
            info = stored.info
            misfit = f"expected a dtype of {', '.join(FLOATS)}, got {info.dtype} in {info.file.name}"
        else:
            misfit = form.misfit(stored)
            first = formats.setdefault(tensor.weights[0].path, form)
            if misfit is None and first is not form:
                misfit = f"expected {first.name} as for the other experts, got {form.name}"
        if misfit is not None:
            wrong.append(f"{tensor.name} ({misfit})")
    unknown = [name for name in checkpoint.names if name not in claimed and weights.ignored(name) is None]
    problems = {
        f"names that the table of {family.model_type} does not know": unknown,
        "tensors that it needs and that are missing": missing,
        "tensors of another shape or dtype": wrong,
    }
    faults = [f"{what}: {listed(names)}" for what, names in problems.items() if names]
    if faults:
        raise ConvertError(f"{checkpoint.folder}: {'; '.join(faults)}")


def _check_copies(weights: Weights) -> None:
    """A tensor that is read past because it repeats another must repeat it."""
    checkpoint = weights.checkpoint
    for name in checkpoint.names:
        rule = weights.ignored(name)
        if rule is None or rule.same_as is None:
            continue
        original = weights.specs[rule.same_as].name
        first, second = checkpoint.read(name), checkpoint.read(original)
        same = first.dtype == second.dtype and first.shape == second.shape
        if not same or not np.array_equal(first.reshape(-1).view(np.uint8), second.reshape(-1).view(np.uint8)):
            given = f"other values in {checkpoint.info(name).file.name}; set tie_word_embeddings to false to use both"
            raise ConvertError(
                f"{checkpoint.folder}: {name}: expected {rule.reason} ({original}, as {CONFIG} says), got {given}"
            )
