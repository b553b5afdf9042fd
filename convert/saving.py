"""Model folders from a stream of weights: the way back from `convert.weights.stream`."""

import itertools
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from convert.checkpoint import CONFIG, MAX_SHARD_BYTES, WEIGHT_FILES, open_checkpoint, write_config, write_shards
from convert.errors import ConvertError, unexpected
from convert.families import Family, family_for
from convert.files import atomic_folder, read_json
from convert.formats import Format, StackedTensor, format_of_tensor
from convert.formats.declared import quantization_methods
from convert.formats.mxfp4 import interleave
from convert.model.spec import APART, MODULES, WeightSpec
from convert.model.tensors import expert_name, tensors_of

SIDE_FILES = (
    *("generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("chat_template*", "*processor_config.json", "LICENSE*", "NOTICE*", "USE_POLICY*"),
)


def save(
    folder: str | os.PathLike[str],
    tensors: Iterable[tuple[str, Any]],
    config: Mapping[str, Any] | None = None,
    *,
    source: str | os.PathLike[str] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a model folder from a stream, whole or not at all, holding one shard in memory.

    Every array is written with the bytes it has. config.json's quantization_config follows the stream: it is added
    for packed tensors and dropped without them; otherwise the source's config.json is copied byte for byte.

    Args:
        folder: The final place; weight files of an earlier save there are replaced, other files stay.
        tensors: (tree path, array or packed tensor), each of the family's paths once, in any order.
        config: Contents of config.json; None for the source's.
        source: Folder to copy tokenizer, generation config, licence and the family's ignored tensors from, or None.
        max_shard_bytes: A shard is closed before it would grow beyond this.

    Raises:
        ConvertError: Neither config nor source; a path that the family lacks, that is missing or comes twice, or an
            array of another shape; the message lists them.
        OSError: The files cannot be written; nothing half-written is left.
    """
    origin = None if source is None else Path(source)
    if config is None and origin is None:
        raise ConvertError(f"{folder}: expected a config, or a source folder with {CONFIG}, got neither")
    original = read_json(origin / CONFIG) if origin is not None and (origin / CONFIG).exists() else None
    if config is None:
        config = read_json(Path(origin or "") / CONFIG)
    family = family_for(config)
    if (family.others or family.mixture) and origin is not None:
        family = family.named_as(open_checkpoint(origin).names)
    saved = _Saved(folder, family, family.specs(config))
    with atomic_folder(folder, replaces=WEIGHT_FILES) as temporary:
        groups = itertools.chain(saved.groups(tensors), () if origin is None else _copied(family, origin))
        write_shards(temporary, groups, max_shard_bytes=max_shard_bytes)
        config = saved.config(config)
        if origin is not None:
            copy_side_files(origin, temporary)
        if origin is not None and config == original:
            shutil.copyfile(origin / CONFIG, temporary / CONFIG)
        else:
            write_config(temporary / CONFIG, config)


def _copied(family: Family, origin: Path) -> Iterator[dict[str, np.ndarray]]:
    """A folder's tensors that the family ignores and derived folders get."""
    if any(rule.copied for rule in family.ignored):
        checkpoint = open_checkpoint(origin)
        for name in checkpoint.names:
            rule = family.ignores(name, checkpoint.config)
            if rule is not None and rule.copied:
                yield {name: checkpoint.read(name)}


class _Saved:
    """Weights of the tree put into a checkpoint's tensors; those of a shared one wait for each other."""

    def __init__(self, folder: str | os.PathLike[str], family: Family, specs: Iterable[WeightSpec]):
        self.folder, self.family = folder, family
        self.specs: dict[str, WeightSpec] = {spec.path: spec for spec in specs}
        self.tensors = tensors_of(self.specs.values())
        self.waiting: dict[str, dict[str, Any]] = {}
        self.formats: dict[str, Format | None] = {}  # of the weights so far; None: a plain array
        self.storage: list[
            tuple[str, str]
        ] = []  # of packed ones, the dtype that they decode to and that of their codes

    def groups(self, tensors: Iterable[tuple[str, Any]]) -> Iterator[dict[str, np.ndarray]]:
        """The checkpoint's tensors, in groups for one shard; in the end all of the model's."""
        for path, tensor in tensors:
            spec = self.specs.get(path)
            if spec is None or path in self.formats:
                reason = f"no such path in the table of {self.family.model_type}" if spec is None else "came twice"
                raise ConvertError(f"{self.folder}: {path}: {reason}")
            if tuple(tensor.shape) != spec.shape:
                raise unexpected(self.folder, f"{path}: shape", str(list(spec.shape)), list(tensor.shape))
            form = self.formats[path] = format_of_tensor(tensor)
            if form is not None:
                first = tensor.tensors[0] if isinstance(tensor, StackedTensor) else tensor
                self.storage.append((first.dtype, first.storage_dtype))
            yield from self._put(spec, tensor, form)
        missing = [path for path in self.specs if path not in self.formats]
        if missing:
            raise ConvertError(f"{self.folder}: expected all of the model's tensors, missing {', '.join(missing)}")

    def _put(self, spec: WeightSpec, values: Any, form: Format | None) -> Iterator[dict[str, np.ndarray]]:
        """The tensors that are whole with a weight."""
        if spec.layout == APART:
            experts = values.tensors if isinstance(values, StackedTensor) else values
            for number, expert in enumerate(experts):
                yield self._written(expert_name(spec, number), expert, form)
            return
        tensor = self.tensors[spec.name]
        waiting = self.waiting.setdefault(spec.name, {})
        waiting[spec.path] = values
        if len(waiting) == len(tensor.weights):
            shares = [waiting[other.path] for other in tensor.weights]
            del self.waiting[spec.name]
            if form is None:
                yield self._written(spec.name, tensor.join([np.asarray(share) for share in shares]), form)
            else:
                yield self._written(spec.name, interleave(shares) if tensor.shared else shares[0], form)

    @staticmethod
    def _written(name: str, values: Any, form: Format | None) -> dict[str, np.ndarray]:
        return {name: np.asarray(values)} if form is None else form.to_tensors(name, values)

    def config(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """config.json with the quantisation of these tensors."""
        config, quantization = dict(given), given.get("quantization_config")
        packed = next((form for form in self.formats.values() if form is not None), None)
        if packed is not None and quantization is None:
            left = [path for path, spec in self.specs.items() if spec.kind in MODULES and self.formats[path] is None]
            dtype, codes = self.storage[0]
            config["quantization_config"] = packed.quantization_config(dtype, self.family.unquantized(left), codes)
        elif packed is None and isinstance(quantization, dict):
            if quantization.get("quant_method") in quantization_methods():
                del config["quantization_config"]
        return config


def copy_side_files(source: Path, target: Path) -> None:
    """Copy tokenizer, chat template, generation config and licence.

    Args:
        source: A model folder.
        target: A folder that is there.
    """
    for file in sorted({file for pattern in SIDE_FILES for file in source.glob(pattern) if file.is_file()}):
        shutil.copyfile(file, target / file.name)
