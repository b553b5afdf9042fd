"""The stream: a model folder as (tree path, array or NF4 tensor), one after the other, and the way back to a folder.

Which tensors there must be, and under what names, is the family's table; what is packed in 4 bits is decided per
tensor by the presence of its quant_state, so folders that leave some modules in 16 bits ("dynamic" ones) just work.
"""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

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
from convert.formats import fp8, nf4
from convert.formats.fp8 import FP8Tensor
from convert.formats.nf4 import NF4Tensor
from convert.model.paths import WeightPath
from convert.model.spec import WeightSpec
from convert.tensor_file import DTYPES

Tensor = np.ndarray | NF4Tensor
FLOATS = ("float32", "bfloat16", "float16")
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
        """How a tensor is stored: "float32", "bfloat16", "float16", "nf4", "nf4-nested" or "fp8"; nothing is read."""
        name = self.specs[path].name
        if self.checkpoint.info(name).dtype in fp8.DTYPES:
            return "fp8"
        if name + nf4.QUANT_STATE not in self.checkpoint.tensors:
            return self.checkpoint.info(name).dtype
        return "nf4-nested" if name + ".nested_absmax" in self.checkpoint.tensors else "nf4"

    def stored_names(self, path: str) -> list[str]:
        """The names of everything that the checkpoint holds of a tensor: scales and such beside it."""
        name = self.specs[path].name
        suffixes = (*nf4.SUFFIXES, *fp8.SCALES) if self.format(path) in ("nf4", "nf4-nested", "fp8") else ("",)
        beside = [name.removesuffix(".weight") + suffix for suffix in fp8.UNUSED] if self.format(path) == "fp8" else []
        return [full for full in (*(name + suffix for suffix in suffixes), *beside) if full in self.checkpoint.tensors]

    def read(self, path: str) -> Tensor:
        """Read one tensor by its tree path, in the tree's layout.

        Raises:
            ConvertError: Its file was cut short, or the parts of an NF4 tensor do not fit together.
        """
        row = self.specs[path]
        if self.format(path).startswith("nf4"):
            return self.read_packed(path)
        array = self.checkpoint.read(row.name)
        if self.format(path) == "fp8":
            return fp8.decode(array, self.fp8_scale(row)).astype(self.decoded_dtype(path))
        return array

    def read_fp8(self, path: str) -> FP8Tensor:
        """Read an FP8 tensor by its tree path, without decoding it.

        Raises:
            ConvertError: Its file was cut short, or its scales do not fit.
        """
        row = self.specs[path]
        return FP8Tensor(self.checkpoint.read(row.name), self.fp8_scale(row), self.decoded_dtype(path).name)

    def read_packed(self, path: str, *, codes: bool = True) -> NF4Tensor:
        """Read an NF4 tensor by its tree path.

        Args:
            path: Its path.
            codes: Read its codes too; otherwise the result has none.

        Raises:
            ConvertError: Its file was cut short, or its parts do not fit together.
        """
        row = self.specs[path]
        names = [row.name + suffix for suffix in nf4.SUFFIXES if row.name + suffix in self.checkpoint.tensors]
        file = self.checkpoint.info(row.name + nf4.QUANT_STATE).file
        parts = {name: self.checkpoint.read(name) for name in names if codes or name != row.name}
        if not codes:
            info = self.checkpoint.info(row.name)
            parts[row.name] = np.zeros(info.shape, np.dtype(info.dtype))  # never touched, so it takes no memory
        tensor = nf4.from_tensors(row.name, parts, file)
        if tensor.shape != row.shape:
            raise unexpected(file, f"{row.name}: shape", str(list(row.shape)), list(tensor.shape))
        return tensor if codes else replace(tensor, codes=np.empty(0, np.uint8))

    def fp8_scale(self, row: WeightSpec) -> fp8.Scale:
        """Read the scales of an FP8 weight.

        Raises:
            ConvertError: There are none, or they do not fit the weight.
        """
        names = [row.name + suffix for suffix in fp8.SCALES if row.name + suffix in self.checkpoint.tensors]
        file = self.checkpoint.info(row.name).file
        if not names:
            raise ConvertError(f"{file}: {row.name} is FP8 and needs {row.name}{fp8.SCALES[0]}, which is missing")
        block = fp8.block_shape(self.checkpoint.config, self.checkpoint.folder / CONFIG)
        scales = self.checkpoint.read(names[0])
        return fp8.make_scale(names[0], scales, row.shape, block, self.checkpoint.info(names[0]).file)

    def decoded_dtype(self, path: str) -> np.dtype:
        """The dtype of a tensor's values once they are unpacked: its own, or for FP8 the one that config.json names."""
        kind = self.format(path)
        if kind == "fp8":
            config = self.checkpoint.config
            named = config.get("dtype", config.get("torch_dtype"))
            return DTYPES["BF16"] if named not in FLOATS else np.dtype(named)
        if kind.startswith("nf4"):
            field = self.specs[path].name + nf4.QUANT_STATE
            state = nf4.read_state(self.checkpoint.read(field).tobytes(), self.checkpoint.info(field).file, field)
            return np.dtype(state["dtype"])
        return np.dtype(kind)


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


def stream(
    folder: str | os.PathLike[str] | Weights, packed_fp8: Callable[[str], bool] = lambda path: False
) -> Iterator[tuple[WeightPath, Tensor | FP8Tensor]]:
    """A model's tensors in the order embeddings, layer 0 … layer L-1, norm, head, each read when its turn comes.

    Args:
        folder: A Hugging Face model folder, or its open weights.
        packed_fp8: By tree path, whether an FP8 tensor stays packed, if its layout in the tree is the file's.

    Yields:
        (tree path, array, NF4 tensor or FP8 tensor); paths as in `convert.families`, without a head if it is tied.

    Raises:
        ConvertError: What `open_weights` or a read finds; names are checked before the first tensor.
    """
    weights = folder if isinstance(folder, Weights) else open_weights(folder)
    _check_copies(weights)
    for path, row in weights.specs.items():
        packed = weights.format(path) == "fp8" and packed_fp8(path)
        yield row.path, weights.read_fp8(path) if packed else weights.read(path)


def save(
    folder: str | os.PathLike[str],
    tensors: Iterable[tuple[str, Tensor]],
    config: Mapping[str, Any] | None = None,
    *,
    source: str | os.PathLike[str] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a model folder from a stream, whole or not at all, holding one shard in memory.

    Every array is written with the bytes it has. config.json's quantization_config follows the stream: it is added
    for NF4 tensors and dropped without them; otherwise the source's config.json is copied byte for byte.

    Args:
        folder: The final place; weight files of an earlier save there are replaced, other files stay.
        tensors: (tree path, array or NF4 tensor), each of the family's paths once, in any order.
        config: Contents of config.json; None for the source's.
        source: Folder to copy tokenizer, generation config and licence from, and the tensors that the family reads past
            and keeps, if there is one.
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
    seen: dict[str, Tensor] = {}  # NF4 tensors without their arrays; an empty array for the others

    def groups() -> Iterator[dict[str, np.ndarray]]:
        for path, tensor in tensors:
            row = rows.get(path)
            if row is None or path in seen:
                reason = f"no such path in the table of {family.model_type}" if row is None else "came twice"
                raise ConvertError(f"{folder}: {path}: {reason}")
            if tuple(tensor.shape) != row.shape:
                raise unexpected(folder, f"{path}: shape", str(list(row.shape)), list(tensor.shape))
            if isinstance(tensor, NF4Tensor):
                empty = np.empty(0, np.uint8)
                seen[path] = replace(tensor, codes=empty, absmax=empty)
                yield nf4.to_tensors(row.name, tensor)
            else:
                seen[path] = np.empty(0, np.uint8)
                yield {row.name: np.asarray(tensor)}
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
        config = _follow_stream(dict(config), seen, rows, family)
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


def _check_quantization(config: Mapping[str, Any], file: Path) -> None:
    """Refuse by name what is packed in a way that is not NF4."""
    quantization = config.get("quantization_config")
    if quantization is None:
        return
    if not isinstance(quantization, dict):
        raise unexpected(file, "quantization_config", "an object or null", quantization)
    method = quantization.get("quant_method")
    if method in fp8.METHODS:  # what is not FP8 there is found by its names and dtypes
        return
    if method != "bitsandbytes":
        expected = f"'bitsandbytes', {', '.join(map(repr, fp8.METHODS))} or no quantization"
        raise unexpected(file, "quantization_config.quant_method", expected, method)
    if quantization.get("load_in_8bit"):
        raise unexpected(file, "quantization_config.load_in_8bit", "false (NF4 is the format that is read)", True)
    kind = quantization.get("bnb_4bit_quant_type")
    if quantization.get("load_in_4bit") and kind != "nf4":
        raise unexpected(file, "quantization_config.bnb_4bit_quant_type", "'nf4'", kind)


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
        claimed.add(row.name)
        info = checkpoint.info(row.name)
        if row.name + nf4.QUANT_STATE in checkpoint.tensors:
            claimed.update(row.name + suffix for suffix in nf4.SUFFIXES)
        elif info.dtype in fp8.DTYPES and info.shape == row.shape and len(row.shape) == 2:
            claimed.update(row.name + suffix for suffix in fp8.SCALES)
            claimed.update(row.name.removesuffix(".weight") + suffix for suffix in fp8.UNUSED)
        elif info.dtype not in FLOATS:
            wrong.append(f"{row.name} (expected a dtype of {', '.join(FLOATS)}, got {info.dtype} in {info.file.name})")
        elif info.shape != row.shape:
            given = f"got {list(info.shape)} in {info.file.name}"
            wrong.append(f"{row.name} (expected {list(row.shape)} from {CONFIG}, {given})")
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
            given = f"other values in {checkpoint.info(name).file.name}; set tie_word_embeddings to false to use both"
            raise ConvertError(
                f"{checkpoint.folder}: {name}: expected {rule.reason} ({original}, as {CONFIG} says), got {given}"
            )


def _follow_stream(
    config: dict[str, Any], seen: Mapping[str, Tensor], rows: Mapping[str, WeightSpec], family: Family
) -> dict[str, Any]:
    """The config with the quantization_config that the tensors need."""
    packed = [tensor for tensor in seen.values() if isinstance(tensor, NF4Tensor)]
    if not packed:
        quantization = config.get("quantization_config")
        if isinstance(quantization, dict) and quantization.get("quant_method") in ("bitsandbytes", *fp8.METHODS):
            del config["quantization_config"]
    elif config.get("quantization_config") is None:
        left = [path for path, row in rows.items() if row.kind == "matrix" and not isinstance(seen[path], NF4Tensor)]
        config["quantization_config"] = nf4.quantization_config(packed[0], family.unquantized(left))
    return config
