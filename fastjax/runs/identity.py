"""Fingerprints of a run's inputs: base, data, tokenizer, adapter. A resumed run must have the same.

Large tensors are sampled: of more than 64 KiB sixteen blocks of 4 KiB, evenly spaced from the first byte to the last,
of a smaller one every byte. So an 8B folder takes 4,700 reads and 19 MB, and another fine-tune of the same
base, a merged adapter or another quantisation is told apart; a change to single rows of a table may not be.

Nothing here imports JAX.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from convert.adapters import Adapter
from convert.checkpoint import WEIGHT_FILES, Checkpoint
from convert.tensor_file import TensorInfo
from fastjax.errors import ConfigError
from fastjax.runs.datasets import RunData

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_BLOCK, _BLOCKS = 4096, 16
#: Fields of an adapter's settings that nothing here depends on.
_NO_SETTINGS = ("base_model_name_or_path", "revision", "task_type", "inference_mode")


class Identity(NamedTuple):
    """Fingerprints; None: there is no such input, or an earlier version did not keep it.

    Attributes:
        model: of the base's config.json, and the names and sizes of its weight files.
        data: of the rows that are learnt, or of the sources where they are streamed.
        weights: of the base's tensors, sampled.
        adapter: of the settings of the adapter to start from.
        adapter_weights: of its tensors, sampled.
        tokenizer: of the tokenizer, with its chat template.
        held_out: of the held-out rows.
        start: of the trained arrays in memory that a run begins with, where they are its reference.
    """

    model: str
    data: str
    weights: str | None = None
    adapter: str | None = None
    adapter_weights: str | None = None
    tokenizer: str | None = None
    held_out: str | None = None
    start: str | None = None


#: Those that decide the meaning of the state: the setting, the expected input, the other one.
_FIXED = {
    "model": ("model.model_name", "the base model", "one with another config.json or other weight files"),
    "weights": ("model.model_name", "the base model", "one whose weights have other values"),
    "adapter": ("lora.adapter", "the adapter's settings", "others in adapter_config.json"),
    "data": (
        "data.train",
        "the data",
        "other rows, of which its position says nothing (fastjax 0.2 learns some conversations otherwise than 0.1, see "
        "CHANGELOG.md: go on with the version that the run began with); to train on, start a new run from what was "
        "learnt (lora.adapter, or model.model_name)",
    ),
    "start": ("model", "the adapter that the run began with, its reference,", "another one; load that adapter again"),
}
#: Those that may differ, with the line that says so.
_TOLD = {
    "adapter_weights": "lora.adapter: other weights than the run began with; those of the checkpoint are gone on with",
    "tokenizer": "the tokenizer or its chat template: another than the run began with; the rows are the same",
    "held_out": "data.eval: other rows than before; their losses do not compare with the earlier ones",
}


def run_identity(
    data: RunData,
    tokenizer: "PreTrainedTokenizerFast",
    base: Mapping[str, str],
    adapter: Adapter | None = None,
    start: Any = None,
) -> Identity:
    """The fingerprints of a run.

    Args:
        data: its data.
        tokenizer: its own.
        base: the fingerprints of its base.
        adapter: that it starts from; None: there is none in a folder.
        start: the trained arrays in memory that are its reference; None: there are none.
    """
    settings = None
    if adapter is not None:
        known = {name: value for name, value in dataclasses.asdict(adapter.config).items() if name not in _NO_SETTINGS}
        known |= {name: sorted(value) for name, value in known.items() if isinstance(value, list)}  # PEFT's are sets
        settings = digest(json.dumps(known, sort_keys=True))
    return Identity(
        **base,
        data=data.train.fingerprint,
        adapter=settings,
        adapter_weights=None if adapter is None else tensors_fingerprint(adapter.stored),
        tokenizer=tokenizer_fingerprint(tokenizer),
        held_out=None if data.held_out is None else data.held_out.fingerprint,
        start=None if start is None else arrays_fingerprint(start),
    )


def tokenizer_fingerprint(tokenizer: "PreTrainedTokenizerFast") -> str:
    """A short name for a tokenizer with its chat template.

    Args:
        tokenizer: the tokenizer.
    """
    shown = [tokenizer.backend_tokenizer.to_str(), str(tokenizer.special_tokens_map), str(tokenizer.chat_template)]
    return digest(json.dumps(shown))


def base_identity(base: Checkpoint) -> dict[str, str]:
    """The fingerprints of a run's base: `model` and `weights`.

    Args:
        base: its open folder.
    """
    return {"model": model_fingerprint(base.folder), "weights": tensors_fingerprint(base.tensors)}


def check_identity(where: Path, old: Identity, new: Identity, *, holds_start: bool = False) -> list[str]:
    """Compare the inputs of a checkpoint's run with those of the run that resumes from it.

    Args:
        where: the checkpoint, or the result.
        old: its fingerprints.
        new: the resumed run's.
        holds_start: whether the adapter to start from is the run's reference, and so must be the same.

    Returns:
        A line for each difference that is allowed.

    Raises:
        ConfigError: another base, other settings of the adapter, or other data.
    """
    pairs = zip(Identity._fields, old, new, strict=True)
    differ = {name for name, was, now in pairs if was is not None and now is not None and was != now}
    for name, (key, what, other) in _FIXED.items():
        if name in differ:
            raise ConfigError(f"{key}: expected {what} of {where}, got {other}")
    if holds_start and "adapter_weights" in differ:
        raise ConfigError(
            f"lora.adapter: expected the adapter that the run of {where} began with, its reference, got one with other "
            "weights"
        )
    return [line for name, line in _TOLD.items() if name in differ]


def model_fingerprint(folder: str | Path) -> str:
    """A short name for a model folder: its config.json, and the names and sizes of its weight files.

    Args:
        folder: in Hugging Face format.
    """
    digest = hashlib.sha256()
    for name, size, _ in files_of(folder):
        digest.update(f"{name} {size}\n".encode())
        if name == "config.json":
            digest.update((Path(folder) / name).read_bytes())
    return digest.hexdigest()[:16]


def files_of(folder: str | Path) -> list[tuple[str, int, int]]:
    """Names, bytes and times of change (ns) of a model folder's config.json and weight files.

    Args:
        folder: in Hugging Face format.
    """
    files = sorted(file for pattern in ("config.json", *WEIGHT_FILES) for file in Path(folder).glob(pattern))
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def tensors_fingerprint(tensors: Mapping[str, TensorInfo]) -> str:
    """A short name for the contents of tensors, of large ones by a sample.

    Args:
        tensors: name → where each lies.

    Returns:
        Hexadecimal digits: equal for equal tensors, whichever files they are divided into.
    """
    digest, files = hashlib.sha256(), {}
    try:
        for name, info in sorted(tensors.items()):
            digest.update(f"{name} {info.dtype} {list(info.shape)}\n".encode())
            if info.file not in files:
                files[info.file] = os.open(info.file, os.O_RDONLY)
            for start, length in _blocks(info.nbytes):
                digest.update(os.pread(files[info.file], length, info.start + start))
    finally:
        for descriptor in files.values():
            os.close(descriptor)
    return digest.hexdigest()[:16]


def arrays_fingerprint(arrays: Any) -> str:
    """A short name for arrays in memory, of every byte.

    Args:
        arrays: a tree of dicts, of NumPy's or JAX's.
    """

    def parts(tree: Any, name: str) -> Iterator[tuple[str, np.ndarray]]:
        if isinstance(tree, Mapping):
            for key in sorted(tree, key=str):
                yield from parts(tree[key], f"{name}.{key}")
        else:
            yield name, np.asarray(tree)

    digest = hashlib.sha256()
    for name, array in parts(arrays, ""):
        digest.update(f"{name} {array.dtype} {list(array.shape)}\n".encode() + array.tobytes())
    return digest.hexdigest()[:16]


def _blocks(size: int) -> list[tuple[int, int]]:
    """(offset, length) of the sampled blocks of a tensor of so many bytes."""
    if size <= _BLOCK * _BLOCKS:
        return [(0, size)]
    return [(int(start), _BLOCK) for start in np.linspace(0, size - _BLOCK, _BLOCKS).astype(np.int64)]


def digest(text: str) -> str:
    """A short name for a text.

    Args:
        text: the text.
    """
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
