"""A Hugging Face folder: config.json and safetensors, one file or shards with an index.

Opening reads config, index and headers; tensors are read on request. Writing holds one shard at a time. Pickled
checkpoints (pytorch_model.bin) run code when loaded and are never opened.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from convert.errors import ConvertError, listed, shorten, shown, unexpected
from convert.files import read_json
from convert.tensor_file import TensorInfo, read_header, read_tensor, write_tensor_file

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
WEIGHT_FILES = ("model.safetensors", "model-*-of-*.safetensors", INDEX)
MAX_SHARD_BYTES = 4 * 2**30


@dataclass(frozen=True)
class Checkpoint:
    """An open folder.

    Attributes:
        folder: Its path.
        config: Contents of config.json.
        tensors: name -> place of the tensor.
    """

    folder: Path
    config: dict[str, Any]
    tensors: Mapping[str, TensorInfo]

    @property
    def names(self) -> tuple[str, ...]:
        """All tensor names, sorted."""
        return tuple(sorted(self.tensors))

    def info(self, name: str) -> TensorInfo:
        """Shape, dtype name and file of a tensor; nothing is read.

        Raises:
            ConvertError: There is no such tensor.
        """
        if name not in self.tensors:
            raise ConvertError(f"{self.folder}: no tensor {name} in its safetensors files")
        return self.tensors[name]

    def read(self, name: str) -> np.ndarray:
        """Read one tensor; bfloat16 and float8 as ml_dtypes.

        Raises:
            ConvertError: There is no such tensor, or its file has shrunk since it was opened.
        """
        return read_tensor(name, self.info(name))


def open_checkpoint(folder: str | os.PathLike[str]) -> Checkpoint:
    """Open a folder and check config, index and headers against each other.

    Args:
        folder: A folder with config.json and model.safetensors, or shards and model.safetensors.index.json.

    Returns:
        The checkpoint; no tensor is read yet.

    Raises:
        ConvertError: A file is missing, truncated or contradicts another; the message names it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ConvertError(f"{folder}: no such folder; expected a Hugging Face model folder with {CONFIG}")
    if not (folder / CONFIG).is_file() and (folder / "adapter_config.json").is_file():
        raise ConvertError(f"{folder}: expected a model folder with {CONFIG}, got a PEFT adapter: name its base model")
    config = read_json(folder / CONFIG)
    if (folder / SINGLE).exists() or (folder / INDEX).exists():
        tensors = read_header(folder / SINGLE) if (folder / SINGLE).exists() else _read_shards(folder)
        _check_depth(config, len(tensors), folder / CONFIG)
        return Checkpoint(folder, config, tensors)
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles:
        way_out = "pickled weights are never loaded; save them as safetensors first"
        raise ConvertError(f"{folder}: expected {SINGLE} or {INDEX}, got {', '.join(pickles[:3])}: {way_out}")
    raise ConvertError(f"{folder}: expected {SINGLE} or {INDEX}, got neither")


def write_shards(
    folder: Path, groups: Iterable[Mapping[str, np.ndarray]], *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write model.safetensors, or shards and their index, in place (call it inside `atomic_folder`).

    Args:
        folder: An empty folder.
        groups: Tensors that share a shard, such as an NF4 weight and its scales.
        max_shard_bytes: Largest shard; a larger group gets its own.

    Raises:
        ConvertError: A name repeats, or a dtype cannot be stored.
        OSError: A file cannot be written.
    """
    weight_map: dict[str, int] = {}
    total = shards = 0
    pending: dict[str, np.ndarray] = {}

    def close() -> None:
        nonlocal shards, pending
        shards += 1
        write_tensor_file(folder / f"{shards}.part", pending)
        pending = {}

    for group in groups:
        twice = sorted(name for name in group if name in weight_map)
        if twice:
            raise ConvertError(f"{folder}: expected every tensor once, got a second {', '.join(twice)}")
        size = sum(array.nbytes for array in group.values())
        if pending and size + sum(array.nbytes for array in pending.values()) > max_shard_bytes:
            close()
        pending.update(group)
        total += size
        weight_map.update(dict.fromkeys(group, shards + 1))
    if pending or not shards:
        close()
    if shards == 1:
        os.rename(folder / "1.part", folder / SINGLE)
        return
    names = {number: f"model-{number:05d}-of-{shards:05d}.safetensors" for number in range(1, shards + 1)}
    for number, name in names.items():
        os.rename(folder / f"{number}.part", folder / name)
    files = {name: names[number] for name, number in sorted(weight_map.items())}
    write_config(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": files})


def write_config(file: Path, config: Mapping[str, Any]) -> None:
    """Write a JSON file in transformers' layout: indented by two, keys sorted, a final newline."""
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _check_depth(config: Mapping[str, Any], stored: int, file: Path) -> None:
    """Refuse more layers than tensors, before anything is made for each layer."""
    sections = {"": config, "text_config.": config.get("text_config")}
    for name, section in sections.items():
        layers = section.get("num_hidden_layers") if isinstance(section, Mapping) else None
        if type(layers) is int and layers > stored:
            expected = f"at most {stored}, as there are no more tensors beside it"
            raise unexpected(file, f"{name}num_hidden_layers", expected, layers)


def _read_shards(folder: Path) -> dict[str, TensorInfo]:
    """All tensors of an index's shards, after checking that index and shards agree."""
    index = folder / INDEX
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise unexpected(index, "weight_map", "an object {tensor: shard}", weight_map)
    for name, shard in weight_map.items():
        plain = isinstance(shard, str) and shard == os.path.basename(shard) and "\\" not in shard and "\0" not in shard
        if not plain or not shard.endswith(".safetensors"):
            raise unexpected(
                index, f"weight_map[{shown(name, 100)}]", "the plain name of a .safetensors file beside it", shard
            )
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not os.path.exists(folder / shard)]  # False also for too long a name
    if missing:
        raise ConvertError(f"{index}: weight_map: expected every shard beside the index, missing {listed(missing)}")
    named: dict[str, list[str]] = {shard: [] for shard in shards}
    for name, shard in weight_map.items():
        named[shard].append(name)
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        header = read_header(folder / shard)
        absent = sorted(name for name in named[shard] if name not in header)
        if absent:
            raise ConvertError(f"{folder / shard}: expected the tensors that {INDEX} names, missing {listed(absent)}")
        for name, info in header.items():
            if weight_map.get(name, shard) != shard:
                continue
            if name in tensors:
                raise ConvertError(
                    f"{folder / shard}: {shorten(name)} is not in {INDEX} and also in {tensors[name].file.name}"
                )
            tensors[name] = info
    return tensors
