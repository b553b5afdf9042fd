"""Names in LoRA files that other versions and libraries write, as PEFT's present names of this family's modules.

- "lora_A.default.weight": an adapter's own name, which PEFT leaves out of files.
- "model.language_model.layers.…", "language_model.model.layers.…": of a text model inside another model, and the names
  of routers before transformers 5 (`Family.module_path`).
- "mlp.experts.3.gate_proj": experts one by one (`convert.expert_adapters.SingleExperts`).

The settings mean the file's names. Where they do not mean the same by the names here, each module is named in them.
"""

import dataclasses
import math
import re
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from convert.adapter_config import AdapterConfig, rank_and_alpha, selects, targets, targets_parameter, tuned_name
from convert.errors import ConvertError
from convert.expert_adapters import nested_module
from convert.families import Family
from convert.model.paths import WeightPath

_OWN_NAME = re.compile(
    r"(\.(?:lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector|modules_to_save"
    r"|trainable_tokens_delta))\.(?!(?:weight|bias)$)[^.]+(?=\.|$)"
)


class AdaptedModule(NamedTuple):
    """The module of an array in a file.

    Attributes:
        module: Its path; of an expert by itself the projection's.
        expert: The expert's number, or None.
    """

    module: WeightPath
    expert: int | None = None


def without_own_name(name: str) -> str:
    """The name of an array without that of its adapter.

    Args:
        name: As a file has it.
    """
    return _OWN_NAME.sub(r"\1", name)


def adapted_module(name: str, config: AdapterConfig, family: Family, *, lora: bool) -> AdaptedModule:
    """The module of an array.

    Args:
        name: The module's, as a file has it.
        config: The adapter's settings.
        family: The base model's.
        lora: Whether the array is A or B, which experts have by other rules.

    Raises:
        ConvertError: The family has no such module.
    """
    single = family.expert_of(name) if lora else None
    if single is not None:
        return AdaptedModule(*single)
    nested = nested_module(family.own_name(name), config, family) if lora else None
    return AdaptedModule(nested or family.module_path(name))


def with_own_names(config: AdapterConfig, family: Family) -> AdapterConfig:
    """The settings with this family's prefix in the whole names that they list.

    Args:
        config: An adapter's, of any origin.
        family: The base model's.
    """

    def named(entry: str) -> str:
        try:
            family.module_path(entry.removesuffix(".weight"))
        except ConvertError:
            return entry
        return family.own_name(entry)

    lists = {
        field: [named(entry) for entry in value]
        for field in ("target_modules", "target_parameters", "exclude_modules", "modules_to_save")
        if isinstance(value := getattr(config, field), list)
    }
    return dataclasses.replace(config, **lists)


def settings_here(
    config: AdapterConfig, modules: Mapping[WeightPath, Collection[str]], family: Family, file: object
) -> AdapterConfig:
    """The settings that mean by the names here what the adapter's mean by those in its file.

    Args:
        config: The adapter's.
        modules: Module with A and B -> its names in the file, of experts one by one those of each.
        family: The base model's.
        file: The file, for messages.

    Returns:
        The same settings, unless that takes others; and where they do not select a module by either name.

    Raises:
        ConvertError: Experts of one layer have other ranks or scales than each other.
    """
    wanted: dict[WeightPath, tuple[int, float]] = {}
    for module, names in modules.items():
        first, *_ = names
        if module.of_experts and family.expert_of(first) is None:  # under the parameter's wrapper
            wanted[module] = rank_and_alpha(config, tuned_name(module, family))
        elif module.is_router and targets_parameter(config, f"{first}.weight"):
            wanted[module] = rank_and_alpha(config, f"{first}.weight")
        elif all(targets(config, name, family=family) or _all(config, module) for name in names):
            wanted[module] = _together(config, module, names, family, file)
        else:
            return config
    here = {
        module: selects(config, module, family) and rank_and_alpha(config, tuned_name(module, family))
        for module in wanted
    }
    return config if here == wanted else _by_module(config, wanted, family)


def _all(config: AdapterConfig, module: WeightPath) -> bool:
    """Whether "all-linear" means a router or an expert, which were linear modules before transformers 5."""
    linear = isinstance(config.target_modules, str) and config.target_modules.lower() == "all-linear"
    return linear and (module.of_experts or module.is_router)


def _together(
    config: AdapterConfig, module: WeightPath, names: Iterable[str], family: Family, file: object
) -> tuple[int, float]:
    """Rank and alpha of a module; of experts by themselves those of one adapter on all, with gate's and up's ranks."""
    ranks = {rank_and_alpha(config, name) for name in names}
    if len(ranks) > 1:
        listed = ", ".join(f"rank {rank} with lora_alpha {alpha:g}" for rank, alpha in sorted(ranks))
        raise ConvertError(
            f"{file}: {module}: expected one rank and lora_alpha for the experts of a layer, got {listed}"
        )
    [(rank, alpha)] = ranks
    count = len({single[0] for name in names if (single := family.expert_of(name))}) or 1
    return rank * count, alpha * (math.sqrt(count) if config.use_rslora else count)


def _by_module(config: AdapterConfig, wanted: Mapping[WeightPath, tuple[int, float]], family: Family) -> AdapterConfig:
    """Settings that name each module, its rank and its alpha."""
    names = {tuned_name(module, family): module.of_experts or module.is_router for module in wanted}
    ranks, alphas = (
        {re.escape(name): value[n] for name, value in zip(names, wanted.values(), strict=True) if value[n] != default}
        for n, default in enumerate((config.r, config.lora_alpha))
    )
    parameters = [name for name, of_parameter in names.items() if of_parameter]
    return dataclasses.replace(
        config,
        target_modules=[name for name, of_parameter in names.items() if not of_parameter],
        target_parameters=parameters or None,
        exclude_modules=None,
        layers_to_transform=None,
        layers_pattern=None,
        rank_pattern=ranks,
        alpha_pattern=alphas,
        lora_dropout=0.0 if parameters else config.lora_dropout,  # PEFT has none on parameters; training alone uses it
    )
