"""PEFT LoRA folders: adapter_config.json and adapter_model.safetensors, to and from named arrays.

An array's name is its module's path in the tree and its leaf:

- ``layers.0.self_attn.q_proj.lora_A`` [r, in], ``.lora_B`` [out, r]; with DoRA ``.lora_magnitude_vector`` [out];
- ``embed_tokens.lora_embedding_A`` [r, vocabulary], ``.lora_embedding_B`` [width, r]; with DoRA
  ``.lora_magnitude_vector`` [width];
- ``embed_tokens.modules_to_save.weight``, ``lm_head.modules_to_save.weight``: modules trained whole;
- ``embed_tokens.trainable_tokens_delta``, ``lm_head.trainable_tokens_delta`` [tokens, width]: trained rows in place
  of those of the tokens in ``trainable_token_indices`` (no differences, despite the name);
- ``embed_tokens.base_layer.weight``, ``lm_head.base_layer.weight``: the frozen matrix that PEFT saves beside an
  adapter on these two, and where the vocabulary has grown. PEFT loads it over the base model's and does not need it:
  leave it out.

With ``ensure_weight_tying`` on a tied model PEFT wants the head's entries too, as copies of the embedding's.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from convert.adapter_config import (
    CONFIG,
    AdapterConfig,
    config_from_json,
    config_to_json,
    rank_and_alpha,
    saves_whole,
    scaling,
    targets,
)
from convert.checkpoint import write_config
from convert.errors import ConvertError, shorten, unexpected
from convert.families import Family
from convert.families.llama import LLAMA
from convert.files import atomic_folder, read_json
from convert.finite import is_finite, nonfinite
from convert.model.paths import TABLES, WeightPath
from convert.tensor_file import TensorInfo, read_header, read_tensor, write_tensor_file

__all__ = [
    "Adapter",
    "AdapterConfig",
    "open_adapter",
    "rank_and_alpha",
    "read_adapter",
    "saves_whole",
    "scaling",
    "targets",
    "write_adapter",
]

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
#: Leaf of an array's path -> the end of its name in the file.
_STORED = {
    "lora_A": ".lora_A.weight",
    "lora_B": ".lora_B.weight",
    "lora_embedding_A": ".lora_embedding_A",
    "lora_embedding_B": ".lora_embedding_B",
    "lora_magnitude_vector": ".lora_magnitude_vector",
    "trainable_tokens_delta": ".token_adapter.trainable_tokens_delta",
    "base_layer.weight": ".base_layer.weight",
    "modules_to_save.weight": ".weight",
    "modules_to_save.bias": ".bias",
}
_WHOLE = frozenset(("modules_to_save.weight", "modules_to_save.bias"))
# PEFT's further names where the vocabulary has grown; a trained module stands there twice.
_GROWN = (
    ("base_layer.weight", ".token_adapter.base_layer.weight"),
    ("base_layer.weight", ".original_module.weight"),
    ("modules_to_save.weight", ".modules_to_save.weight"),
)
_PAIRS = (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B"))


def read_adapter(
    folder: str | os.PathLike[str], *, family: Family = LLAMA, allow_nonfinite: bool = False
) -> tuple[AdapterConfig, dict[str, np.ndarray]]:
    """Read a PEFT LoRA folder.

    Args:
        folder: Holds adapter_config.json and adapter_model.safetensors.
        family: The table of the base model.
        allow_nonfinite: Let NaN and infinity through.

    Returns:
        The settings, and the arrays as they are stored, by the names in this module's description.

    Raises:
        ConvertError: A file is missing or damaged, a setting is not supported, names, ranks and settings contradict
            each other (all listed), or values are not finite.
    """
    adapter = open_adapter(folder, family=family, allow_nonfinite=allow_nonfinite)
    return adapter.config, {path: adapter.read(path) for path in adapter.tensors}


@dataclass(frozen=True)
class Adapter:
    """An open PEFT LoRA folder.

    Attributes:
        folder: Its path.
        config: Its settings.
        tensors: Name, as in this module's description -> the array's place.
        allow_nonfinite: Whether arrays may hold NaN and infinity.
    """

    folder: Path
    config: AdapterConfig
    tensors: Mapping[str, TensorInfo]
    allow_nonfinite: bool = False

    def read(self, path: str) -> np.ndarray:
        """Read one array.

        Raises:
            ConvertError: Its file was cut short since it was opened, or its values are not finite.
        """
        array = read_tensor(path, self.tensors[path])
        if not self.allow_nonfinite and not is_finite(array):
            raise nonfinite(self.tensors[path].file, path)
        return array


def open_adapter(folder: str | os.PathLike[str], *, family: Family = LLAMA, allow_nonfinite: bool = False) -> Adapter:
    """Open a PEFT LoRA folder and check names, ranks and settings against each other; no array is read.

    Args:
        folder: Holds adapter_config.json and adapter_model.safetensors.
        family: The table of the base model.
        allow_nonfinite: Let NaN and infinity through when arrays are read.

    Returns:
        The adapter.

    Raises:
        ConvertError: As `read_adapter`.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ConvertError(f"{folder}: no such folder; expected a PEFT adapter with {CONFIG} and {WEIGHTS}")
    config = config_from_json(read_json(folder / CONFIG), folder / CONFIG)
    if not (folder / WEIGHTS).exists() and (folder / "adapter_model.bin").exists():
        raise unexpected(folder, "weights", f"{WEIGHTS} (pickles are never loaded)", "adapter_model.bin")
    header = read_header(folder / WEIGHTS)
    names = _tree_names(header, config, family, folder / WEIGHTS)
    _check({path: header[name].shape for path, name in names.items()}, config, family, folder / WEIGHTS)
    return Adapter(folder, config, {path: header[name] for path, name in names.items()}, allow_nonfinite)


def write_adapter(
    folder: str | os.PathLike[str],
    config: AdapterConfig,
    arrays: Mapping[str, np.ndarray],
    *,
    family: Family = LLAMA,
) -> None:
    """Write a PEFT LoRA folder, whole or not at all.

    Args:
        folder: The final place; an earlier adapter there is replaced, other files stay.
        config: The settings.
        arrays: By the names in this module's description.
        family: The table of the base model.

    Raises:
        ConvertError: Names, ranks and settings contradict each other (all listed).
        OSError: The files cannot be written; nothing half-written is left.
    """
    hosts = {path: np.asarray(array) for path, array in arrays.items()}
    _check({path: array.shape for path, array in hosts.items()}, config, family, Path(folder) / WEIGHTS)
    tensors = {PREFIX + _file_name(path, family): array for path, array in hosts.items()}
    with atomic_folder(folder, replaces=("adapter_model.*",)) as temporary:
        write_tensor_file(temporary / WEIGHTS, tensors)
        write_config(temporary / CONFIG, config_to_json(config, family))


def _tree_names(
    header: Mapping[str, TensorInfo], config: AdapterConfig, family: Family, file: Path
) -> dict[WeightPath, str]:
    """Tree name -> name in the file; one error lists all unknown names."""
    names: dict[WeightPath, str] = {}
    unknown = []
    for name in header:
        path = None
        for leaf, stored in (*_STORED.items(), *_GROWN):
            if name.startswith(PREFIX) and name.endswith(stored):
                try:
                    module = family.module_path(name[len(PREFIX) : -len(stored)])
                except ConvertError:
                    continue
                if stored == ".weight" and module in TABLES and not _whole(config, module, family):
                    leaf = "base_layer.weight"  # not trained, but grown
                path = module.with_leaf(leaf)
                break
        if path is None:
            unknown.append(name)
        else:
            names[path] = name
    if unknown:
        expected = f"LoRA tensors of {family.model_type} modules under {PREFIX}"
        raise ConvertError(f"{file}: expected only {expected}, got {shorten(', '.join(unknown), 2000)}")
    return names


def _file_name(path: str, family: Family) -> str:
    array = WeightPath.parse(path)
    if array.leaf not in _STORED:
        raise ConvertError(f"{path}: expected an ending of {', '.join(_STORED)}")
    return family.module_name(array.module) + _STORED[array.leaf]


def _check(shapes: Mapping[str, tuple[int, ...]], config: AdapterConfig, family: Family, file: Path) -> None:
    """Refuse half pairs, ranks besides the settings', and modules that the settings do not select (all listed)."""
    wrong: list[str] = []
    modules: dict[WeightPath, set[str]] = {}
    for path in map(WeightPath.parse, shapes):
        if path.leaf not in _STORED:
            wrong.append(f"{path} (no LoRA array has this ending)")
        else:
            modules.setdefault(path.module, set()).add(path.leaf)
    for module, leaves in modules.items():
        name = family.module_name(module)
        whole = leaves & _WHOLE
        adapter = leaves - whole - {"trainable_tokens_delta", "base_layer.weight"}
        twins = _twins(config, module, family)
        if whole and not _whole(config, module, family):
            wrong.append(f"{module} (trained whole, but not in modules_to_save)")
        if "trainable_tokens_delta" in leaves and config.trainable_token_indices is None:
            wrong.append(f"{module} (has rows of tokens, but trainable_token_indices is null)")
        if adapter and not any(targets(config, twin, family=family) for twin in twins):
            wrong.append(f"{module} (an adapter, but no target of target_modules)")
        if adapter and not any(set(pair) <= leaves for pair in _PAIRS):
            wrong.append(f"{module} (needs both A and B)")
        for first, second in _PAIRS:
            if first in leaves and second in leaves:
                rank, _ = rank_and_alpha(config, name)
                a, b = shapes[module.with_leaf(first)], shapes[module.with_leaf(second)]
                if len(a) != 2 or len(b) != 2 or a[0] != rank or b[1] != rank:
                    wrong.append(f"{module} (expected rank {rank} from {CONFIG}, got shapes {list(a)} and {list(b)})")
                if config.use_dora != ("lora_magnitude_vector" in leaves):
                    state = "needs" if config.use_dora else "must not have"
                    wrong.append(f"{module} ({state} lora_magnitude_vector: use_dora is {config.use_dora})")
    if wrong:
        raise ConvertError(f"{file}: arrays that do not fit {CONFIG}: {shorten(', '.join(wrong), 2000)}")


def _twins(config: AdapterConfig, module: str, family: Family) -> list[str]:
    """The Hugging Face names of a module and of its tied twin."""
    tied = config.ensure_weight_tying and module in TABLES
    return [family.module_name(twin) for twin in (TABLES if tied else (module,))]


def _whole(config: AdapterConfig, module: str, family: Family) -> bool:
    """Whether a module, or its tied twin, is trained whole."""
    return any(saves_whole(config, twin) for twin in _twins(config, module, family))
