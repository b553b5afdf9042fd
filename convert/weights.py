"""The stream: a model folder as (tree path, array or packed tensor), one after the other, and the way back to a folder.

The family's table says which tensors there are and under what names, `convert.formats` what each is stored in.
"""

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from convert.blocks import Blocks
from convert.checkpoint import (
    CONFIG,
    MAX_SHARD_BYTES,
    WEIGHT_FILES,
    Checkpoint,
    open_checkpoint,
    write_config,
    write_shards,
)
from convert.errors import ConvertError, listed, unexpected
from convert.families import Family, family_for
from convert.files import atomic_folder, read_json
from convert.formats import FLOATS, FORMATS, Format, Stored, format_of, format_of_tensor
from convert.model.paths import WeightPath
from convert.model.spec import WeightSpec

SIDE_FILES = (
    *("generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("chat_template*", "*processor_config.json", "LICENSE*", "NOTICE*", "USE_POLICY*"),
)


@dataclass(frozen=True)
class Weights:
    """A model folder matched against its family's table.

    Attributes:
        checkpoint: The open folder.
        family: Its table.
        specs: Tree path -> weight, in the order of the stream.
    """

    checkpoint: Checkpoint
    family: Family
    specs: Mapping[str, WeightSpec]

    def format(self, path: str) -> str:
        """The name of a tensor's format in `convert.formats.FORMATS`; nothing is read."""
        return self._format(path).name

    def formats(self) -> list[Format]:
        """The formats of all tensors, in the order of `FORMATS`."""
        found = {self.format(path) for path in self.specs}
        return [form for name, form in FORMATS.items() if name in found]

    def decoded_dtype(self, path: str) -> np.dtype:
        """The dtype of a tensor's values: float32, bfloat16 or float16."""
        return self._format(path).decoded_dtype(self.stored(path))

    def stored(self, path: str) -> Stored:
        """A tensor by its tree path, as its format reads it."""
        spec = self.specs[path]
        return Stored(self.checkpoint, spec.name, spec.shape)

    def stored_names(self, path: str) -> list[str]:
        """The names of a tensor and of its scales in the checkpoint."""
        names = self._format(path).claims(self.specs[path].name)
        return [name for name in names if name in self.checkpoint.tensors]

    def read(self, path: str, *, packed: bool | None = None) -> Any:
        """Read one tensor by its tree path, in the tree's layout.

        Args:
            path: Its path.
            packed: Whether a packed one is returned as it is stored and not decoded; None: where its format is
                writable.

        Returns:
            An array, or for a packed tensor an instance of its format's class.

        Raises:
            ConvertError: A file was cut short, or the parts of a packed tensor do not fit together.
        """
        form = self._format(path)
        tensor = form.read(self.stored(path))
        return tensor if (form.writable if packed is None else packed) else form.decode(tensor)

    def stream(self, *, packed: bool | None = None) -> Iterator[tuple[WeightPath, Any]]:
        """All tensors in the model's order, each read when its turn comes; as `stream`."""
        _check_copies(self)
        for path, spec in self.specs.items():
            yield spec.path, self.read(path, packed=packed)

    def blocks(self, path: str) -> Blocks:
        """A tensor's values as blocks, rounded to the dtype that they decode to."""
        form = self._format(path)
        return lambda: form.blocks(self.stored(path))

    def _format(self, path: str) -> Format:
        form = format_of(self.stored(path))
        assert form is not None, "formats are checked when a folder is opened"
        return form


def open_weights(folder: str | os.PathLike[str] | Checkpoint) -> Weights:
    """Open a folder and match every name in it against the family's table; no tensor is read.

    Args:
        folder: A Hugging Face model folder: 16 or 32 bits, bitsandbytes NF4, or FP8; or one that is open already.

    Returns:
        The matched folder.

    Raises:
        ConvertError: The folder is damaged, its family or quantisation is not supported, or names are left over,
            missing or of another shape or dtype: then one message lists all of them.
    """
    checkpoint = folder if isinstance(folder, Checkpoint) else open_checkpoint(folder)
    file = checkpoint.folder / CONFIG
    _check_quantization(checkpoint.config, file)
    family = family_for(checkpoint.config, file).named_as(checkpoint.names)
    rows: dict[str, WeightSpec] = {spec.path: spec for spec in family.specs(checkpoint.config, file)}
    _check_names(checkpoint, family, rows)
    return Weights(checkpoint, family, rows)


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
    if family.others and origin is not None:
        family = family.named_as(open_checkpoint(origin).names)
    rows: dict[str, WeightSpec] = {spec.path: spec for spec in family.specs(config)}
    seen: dict[str, Format | None] = {}  # None: a plain array
    storage: list[tuple[str, str]] = []  # of packed tensors, the dtype that they decode to and that of their codes

    def groups() -> Iterator[dict[str, np.ndarray]]:
        for path, tensor in tensors:
            row = rows.get(path)
            if row is None or path in seen:
                reason = f"no such path in the table of {family.model_type}" if row is None else "came twice"
                raise ConvertError(f"{folder}: {path}: {reason}")
            if tuple(tensor.shape) != row.shape:
                raise unexpected(folder, f"{path}: shape", str(list(row.shape)), list(tensor.shape))
            form = seen[path] = format_of_tensor(tensor)
            if form is None:
                yield {row.name: np.asarray(tensor)}
            else:
                storage.append((tensor.dtype, tensor.storage_dtype))
                yield form.to_tensors(row.name, tensor)
        if origin is not None and any(rule.copied for rule in family.ignored):
            checkpoint = open_checkpoint(origin)
            for name in checkpoint.names:
                rule = family.ignores(name, checkpoint.config)
                if rule is not None and rule.copied:
                    yield {name: checkpoint.read(name)}

    with atomic_folder(folder, replaces=WEIGHT_FILES) as temporary:
        write_shards(temporary, groups(), max_shard_bytes=max_shard_bytes)
        missing = [path for path in rows if path not in seen]
        if missing:
            raise ConvertError(f"{folder}: expected all of the model's tensors, missing {', '.join(missing)}")
        config = dict(config)
        packed = [form for form in seen.values() if form is not None]
        quantization = config.get("quantization_config")
        if packed and quantization is None:
            left = [path for path, row in rows.items() if row.kind == "matrix" and seen[path] is None]
            dtype, codes = storage[0]
            config["quantization_config"] = packed[0].quantization_config(dtype, family.unquantized(left), codes)
        elif not packed and isinstance(quantization, dict) and quantization.get("quant_method") in _methods():
            del config["quantization_config"]
        if origin is not None:
            copy_side_files(origin, temporary)
        if origin is not None and config == original:
            shutil.copyfile(origin / CONFIG, temporary / CONFIG)
        else:
            write_config(temporary / CONFIG, config)


def copy_side_files(source: Path, target: Path) -> None:
    """Copy tokenizer, chat template, generation config and licence.

    Args:
        source: A model folder.
        target: A folder that is there.
    """
    for file in sorted({file for pattern in SIDE_FILES for file in source.glob(pattern) if file.is_file()}):
        shutil.copyfile(file, target / file.name)


def _methods() -> dict[Any, Format]:
    """``quant_method`` in config.json -> the first format of its folders."""
    found: dict[Any, Format] = {}
    for form in FORMATS.values():
        for method in form.methods:
            found.setdefault(method, form)
    return found


def _check_quantization(config: Mapping[str, Any], file: Path) -> None:
    """Refuse other formats by name."""
    quantization = config.get("quantization_config")
    if quantization is None:
        return
    if not isinstance(quantization, dict):
        raise unexpected(file, "quantization_config", "an object or null", quantization)
    method, known = quantization.get("quant_method"), _methods()
    if method not in known:
        expected = f"{', '.join(map(repr, known))} or no quantization"
        raise unexpected(file, "quantization_config.quant_method", expected, method)
    known[method].check_config(quantization, file)


def _check_names(checkpoint: Checkpoint, family: Family, rows: Mapping[str, WeightSpec]) -> None:
    """Every name has a row and every row a tensor of its shape and a float dtype, or one error lists the others."""
    file = checkpoint.folder / CONFIG
    claimed: set[str] = set()
    missing: list[str] = []
    wrong: list[str] = []
    for row in rows.values():
        if row.name not in checkpoint.tensors:
            missing.append(row.name)
            continue
        stored = Stored(checkpoint, row.name, row.shape)
        form = format_of(stored)
        claimed.update([row.name] if form is None else form.claims(row.name))
        info = stored.info
        wanted = f"expected a dtype of {', '.join(FLOATS)}, got {info.dtype} in {info.file.name}"
        misfit = wanted if form is None else form.misfit(stored)
        if misfit is not None:
            wrong.append(f"{row.name} ({misfit})")
    unknown = [
        name
        for name in checkpoint.names
        if name not in claimed and family.ignores(name, checkpoint.config, file) is None
    ]
    problems = {
        f"names that the table of {family.model_type} does not know": unknown,
        "tensors that it needs and that are missing": missing,
        "tensors of another shape or dtype": wrong,
    }
    found = [f"{what}: {listed(names)}" for what, names in problems.items() if names]
    if found:
        raise ConvertError(f"{checkpoint.folder}: {'; '.join(found)}")


def _check_copies(weights: Weights) -> None:
    """A tensor that is read past because it repeats another must repeat it."""
    checkpoint = weights.checkpoint
    for name in checkpoint.names:
        rule = weights.family.ignores(name, checkpoint.config, checkpoint.folder / CONFIG)
        if rule is None or rule.same_as is None:
            continue
        original = weights.specs[rule.same_as].name
        first, second = checkpoint.read(name), checkpoint.read(original)
        same = first.dtype == second.dtype and first.shape == second.shape
        if not same or not np.array_equal(first.reshape(-1).view(np.uint8), second.reshape(-1).view(np.uint8)):
            found = f"other values in {checkpoint.info(name).file.name}; set tie_word_embeddings to false to use both"
            raise ConvertError(
                f"{checkpoint.folder}: {name}: expected {rule.reason} ({original}, as {CONFIG} says), got {found}"
            )
