"""PEFT LoRA folders: adapter_config.json and adapter_model.safetensors, to and from named arrays.

An array's name is its module's path in the tree and its leaf:

- ``layers.0.self_attn.q_proj.lora_A`` [r, in], ``.lora_B`` [out, r]; with DoRA ``.lora_magnitude_vector`` [out];
- ``layers.0.mlp.experts.gate_up_proj.lora_A`` [X, r, in], ``.lora_B`` [X, out, r]: of all experts of a mixture (in a
  file they lie otherwise: `convert.expert_adapters`);
- ``embed_tokens.lora_embedding_A`` [r, vocabulary], ``.lora_embedding_B`` [width, r]; with DoRA
  ``.lora_magnitude_vector`` [width];
- ``embed_tokens.modules_to_save.weight``, ``lm_head.modules_to_save.weight``: modules trained whole;
  ``score.modules_to_save.weight`` [1, width], a reward model's head;
- ``embed_tokens.trainable_tokens_delta``, ``lm_head.trainable_tokens_delta`` [tokens, width]: trained rows in place
  of those of the tokens in ``trainable_token_indices`` (no differences, despite the name);
- ``embed_tokens.base_layer.weight``, ``lm_head.base_layer.weight``: the frozen matrix that PEFT saves beside an
  adapter on these two, and where the vocabulary has grown. PEFT loads it over the base model's and does not need it:
  leave it out.

With ``ensure_weight_tying`` on a tied model PEFT wants the head's entries too, as copies of the embedding's.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from convert.adapter_config import (
    CONFIG,
    PEFT_VERSION,
    AdapterConfig,
    config_from_json,
    config_to_json,
    rank_and_alpha,
    saves_whole,
    scaling,
    selects,
    targets,
    tuned_name,
)
from convert.adapter_names import AdaptedModule, adapted_module, settings_here, with_own_names, without_own_name
from convert.checkpoint import write_config
from convert.errors import ConvertError, shorten, unexpected
from convert.expert_adapters import (
    ExpertsLayout,
    SingleExperts,
    expert_shapes,
    find_layout,
    nested_name,
    parameter_module,
    single_experts,
    written_layout,
)
from convert.families import Family
from convert.families.llama import LLAMA
from convert.files import atomic_folder, read_json
from convert.finite import is_finite, nonfinite
from convert.model.paths import TABLES, WeightPath
from convert.model.spec import WeightSpec
from convert.renamed_modules import to_parameters
from convert.tensor_file import TensorInfo, read_header, read_tensor, write_tensor_file
from convert.trained_over import TrainedOver, read_trained_over

__all__ = [
    "Adapter",
    "AdapterConfig",
    "open_adapter",
    "rank_and_alpha",
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
# PEFT's further names: where the vocabulary has grown, where a trained module stands twice, and of a whole state dict.
_OTHERS = (
    ("lora_magnitude_vector", ".lora_magnitude_vector.weight"),
    ("base_layer.weight", ".token_adapter.base_layer.weight"),
    ("base_layer.weight", ".original_module.weight"),
    ("modules_to_save.weight", ".modules_to_save.weight"),
)
_PAIRS = (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B"))


@dataclass(frozen=True)
class Adapter:
    """An open PEFT LoRA folder.

    Attributes:
        folder: Its path.
        config: Its settings.
        tensors: Name, as in this module's description -> the array's place.
        layouts: Module with an adapter on experts -> how its arrays lie in the file.
        single: Module with an adapter on each expert by itself -> their arrays, which `tensors` stands for.
        allow_nonfinite: Whether arrays may hold NaN and infinity.
        over: The base that it was trained over; None: its folder does not tell.
    """

    folder: Path
    config: AdapterConfig
    tensors: Mapping[str, TensorInfo]
    layouts: Mapping[WeightPath, ExpertsLayout] = field(default_factory=dict)
    single: Mapping[WeightPath, SingleExperts] = field(default_factory=dict)
    allow_nonfinite: bool = False
    over: TrainedOver | None = None

    @property
    def stored(self) -> Mapping[str, TensorInfo]:
        """Name -> the array's place, for all arrays of the file."""
        stored = {path: info for path, info in self.tensors.items() if WeightPath.parse(path).module not in self.single}
        for module, experts in self.single.items():
            stored |= {f"{module}.{'.'.join(map(str, position))}": info for position, info in experts.places()}
        return stored

    def shape(self, path: str) -> tuple[int, ...]:
        """The shape of an array, as `read` returns it."""
        layout = self.layouts.get(WeightPath.parse(path).module)
        return self.tensors[path].shape if layout is None else layout.tree_shape(WeightPath.parse(path).leaf)

    def read(self, path: str) -> np.ndarray:
        """Read one array.

        Raises:
            ConvertError: Its file was cut short since it was opened, or its values are not finite.
        """
        name = WeightPath.parse(path)
        layout = self.layouts.get(name.module)
        if name.of_experts and layout is None:
            raise ConvertError(f"{self.folder / WEIGHTS}: {path}: expected an adapter opened with its model's weights")
        if layout is None:
            array = read_tensor(path, self.tensors[path])
        else:
            pair, single = [name.with_leaf(leaf) for leaf in _PAIRS[0]], self.single.get(name.module)
            if single is None:
                both = layout.to_tree(*(read_tensor(leaf, self.tensors[leaf]) for leaf in pair))
            else:
                both = single.to_tree(name.module)
            array = both[pair.index(name)]
        if not self.allow_nonfinite and not is_finite(array):
            raise nonfinite(self.tensors[path].file, path)
        return array


def open_adapter(
    folder: str | os.PathLike[str],
    *,
    family: Family = LLAMA,
    specs: Iterable[WeightSpec] = (),
    unsloth_expert_layout: bool = False,
    allow_nonfinite: bool = False,
) -> Adapter:
    """Open a PEFT LoRA folder and check names, ranks and settings against each other; no array is read.

    Args:
        folder: Holds adapter_config.json and adapter_model.safetensors.
        family: The table of the base model.
        specs: The base model's weights; for adapters on experts. Without them these can be listed, not read.
        unsloth_expert_layout: Whether the expert is the slowest index of B too, as in adapters on experts that Unsloth
            wrote before September 2026; their files do not tell.
        allow_nonfinite: Let NaN and infinity through when arrays are read.

    Returns:
        The adapter.

    Raises:
        ConvertError: A file is missing or damaged, a setting is not supported, or names, ranks and settings contradict
            each other (all listed).
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ConvertError(f"{folder}: no such folder; expected a PEFT adapter with {CONFIG} and {WEIGHTS}")
    raw = read_json(folder / CONFIG)
    config = config_from_json(raw, folder / CONFIG)
    if not (folder / WEIGHTS).exists() and (folder / "adapter_model.bin").exists():
        raise unexpected(folder, "weights", f"{WEIGHTS} (pickles are never loaded)", "adapter_model.bin")
    config = with_own_names(config, family)
    tensors, arrays, modules = _tree_names(read_header(folder / WEIGHTS), config, family, folder / WEIGHTS)
    single = single_experts(arrays, folder / WEIGHTS)
    for module, stored in ((module, experts.stored()) for module, experts in single.items()):
        tensors |= {module.with_leaf(leaf): info for leaf, info in zip(_PAIRS[0], stored, strict=True)}
    config = settings_here(config, modules, family, folder / WEIGHTS)
    _check({path: info.shape for path, info in tensors.items()}, config, family, folder / WEIGHTS)
    layouts = {}
    for module, shape in expert_shapes(specs).items():
        a, b = (tensors.get(module.with_leaf(leaf)) for leaf in _PAIRS[0])
        if a is not None and b is not None:
            rank, _ = rank_and_alpha(config, tuned_name(module, family))
            layouts[module] = find_layout(
                module,
                shape,
                rank,
                a.shape,
                b.shape,
                version=PEFT_VERSION if module in single else raw.get("peft_version"),
                slowest=unsloth_expert_layout and module not in single,
                file=str(folder / WEIGHTS),
            )
    over = read_trained_over(folder / WEIGHTS)
    return Adapter(folder, config, tensors, layouts, single, allow_nonfinite, over)


def write_adapter(
    folder: str | os.PathLike[str],
    config: AdapterConfig,
    arrays: Mapping[str, np.ndarray],
    *,
    family: Family = LLAMA,
    over: TrainedOver | None = None,
) -> None:
    """Write a PEFT LoRA folder, whole or not at all.

    Args:
        folder: The final place; an earlier adapter there is replaced, other files stay.
        config: The settings.
        arrays: By the names in this module's description.
        family: The table of the base model.
        over: The base that it was trained over, which is noted in the header; None: nothing is.

    Raises:
        ConvertError: Names, ranks and settings contradict each other (all listed).
        OSError: The files cannot be written; nothing half-written is left.
    """
    hosts = {path: np.asarray(array) for path, array in arrays.items()}
    hosts = _in_file(hosts, family)
    _check({path: array.shape for path, array in hosts.items()}, config, family, Path(folder) / WEIGHTS)
    tensors = {PREFIX + _file_name(path, config, family): array for path, array in hosts.items()}
    paths = [path for path in map(WeightPath.parse, hosts) if path.leaf in {first for first, _ in _PAIRS}]
    modules = [family.module_name(path.module) for path in paths if not path.of_experts and not path.is_router]
    with atomic_folder(folder, replaces=("adapter_model.*",)) as temporary:
        noted = {} if over is None else over.metadata()
        write_tensor_file(temporary / WEIGHTS, tensors, {"format": "pt", **noted})
        write_config(temporary / CONFIG, to_parameters(config_to_json(config, family), modules, family))


class _Names(NamedTuple):
    """The arrays of a file by tree names.

    Attributes:
        tensors: Path -> array.
        single: Path of an A or B on experts one by one -> expert -> array.
        modules: Module with A and B -> its names in the file, of experts one by one those of each.
    """

    tensors: dict[str, TensorInfo]
    single: dict[WeightPath, dict[int, TensorInfo]]
    modules: dict[WeightPath, dict[str, None]]


def _tree_names(header: Mapping[str, TensorInfo], config: AdapterConfig, family: Family, file: Path) -> _Names:
    """The arrays of a file by tree names; one error lists all unknown ones."""
    names, unknown, twice = _Names({}, {}, {}), [], []
    for name, info in header.items():
        if (parsed := _parsed(without_own_name(name), config, family)) is None:
            unknown.append(name)
            continue
        start, (module, expert), leaf = parsed
        path = module.with_leaf(leaf)
        arrays: dict[Any, TensorInfo] = names.tensors if expert is None else names.single.setdefault(path, {})
        key = path if expert is None else expert
        if leaf.startswith("lora_"):
            twice += [name] * (key in arrays)
            names.modules.setdefault(module if expert is None else parameter_module(module), {})[start] = None
        arrays[key] = info
    if unknown or twice:
        wrong, expected = unknown or twice, f"LoRA tensors of {family.model_type} modules under {PREFIX}"
        expected = f"only {expected}" if unknown else f"one adapter's {expected}, each once"
        raise ConvertError(f"{file}: expected {expected}, got {shorten(', '.join(wrong), 2000)}")
    return names


def _parsed(name: str, config: AdapterConfig, family: Family) -> tuple[str, AdaptedModule, str] | None:
    """The module's name in the file, its place, and the leaf of an array; None: unknown."""
    for leaf, stored in (*_STORED.items(), *_OTHERS):
        if name.startswith(PREFIX) and name.endswith(stored):
            start = name[len(PREFIX) : -len(stored)]
            try:
                module = adapted_module(start, config, family, lora=leaf in _PAIRS[0])
            except ConvertError:
                continue
            if stored == ".weight" and module.module in TABLES and not _whole(config, module.module, family):
                leaf = "base_layer.weight"  # not trained, but grown
            return start, module, leaf
    return None


def _in_file(arrays: Mapping[str, np.ndarray], family: Family) -> dict[str, np.ndarray]:
    """The arrays with those of adapters on experts as files have them."""
    stored = dict(arrays)
    for module in {WeightPath.parse(path).module for path in arrays if WeightPath.parse(path).of_experts}:
        pair = [module.with_leaf(leaf) for leaf in _PAIRS[0]]
        if all(leaf in arrays and arrays[leaf].ndim == 3 for leaf in pair):
            a, b = (arrays[leaf] for leaf in pair)
            stored |= zip(pair, written_layout(module, a.shape, b.shape, family).to_file(a, b), strict=True)
    return stored


def _file_name(path: str, config: AdapterConfig, family: Family) -> str:
    array = WeightPath.parse(path)
    if array.leaf not in _STORED:
        raise ConvertError(f"{path}: expected an ending of {', '.join(_STORED)}")
    of_experts = array.of_experts and array.leaf in _PAIRS[0]
    name = nested_name(array.module, config, family) if of_experts else family.module_name(array.module)
    return name + _STORED[array.leaf]


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
        whole = leaves & _WHOLE
        adapter = leaves - whole - {"trainable_tokens_delta", "base_layer.weight"}
        twins = _twins(config, module, family)
        if whole and not _whole(config, module, family):
            wrong.append(f"{module} (trained whole, but not in modules_to_save)")
        if "trainable_tokens_delta" in leaves and config.trainable_token_indices is None:
            wrong.append(f"{module} (has rows of tokens, but trainable_token_indices is null)")
        chosen = selects(config, module, family) or any(targets(config, twin, family=family) for twin in twins)
        if adapter and not chosen:
            field = "target_parameters" if module.of_experts or module.is_router else "target_modules"
            wrong.append(f"{module} (an adapter, but no target of {field})")
        if adapter and not any(set(pair) <= leaves for pair in _PAIRS):
            wrong.append(f"{module} (needs both A and B)")
        for first, second in _PAIRS:
            if first in leaves and second in leaves:
                rank, _ = rank_and_alpha(config, tuned_name(module, family))
                a, b = shapes[module.with_leaf(first)], shapes[module.with_leaf(second)]
                experts = a[0] // rank if module.of_experts and a else 1
                if len(a) != 2 or len(b) != 2 or a[0] != experts * rank or b[1] != a[0]:
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
