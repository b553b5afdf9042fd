"""An adapter's settings and a model: where it attaches, what a fresh one gets, what does not fit. No JAX."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from convert.adapters import AdapterConfig, rank_and_alpha, scaling, targets
from convert.errors import ConvertError, shown
from convert.families import family_for
from convert.model.config import ModelConfig
from convert.model.paths import EMBEDDING, HEAD, TABLES, WeightPath
from convert.patterns import match
from fastjax.errors import ConfigError
from fastjax.models.vocabulary import trained_rows, training_new_tokens


@dataclasses.dataclass(frozen=True)
class AdapterSite:
    """One module that gets an adapter: its path, rank and scale."""

    path: WeightPath
    rank: int
    scaling: float


def adapter_sites(adapter: AdapterConfig, config: ModelConfig) -> list[AdapterSite]:
    """The modules that an adapter attaches to, in the order of the model.

    Raises:
        ConfigError: nothing matches, `modules_to_save` names something else than the embeddings or the head, or a
            combination that is not supported.
    """
    unknown = [name for name in adapter.modules_to_save or () if name.removeprefix("model.") not in TABLES]
    if unknown:
        raise ConfigError(f"modules_to_save: expected some of {list(TABLES)}, given {shown(unknown)}")
    sites = []
    family = family_for({"model_type": config.model_type})
    for path in _candidates(config):
        name = family.module_name(path)
        if targets(adapter, name, family=family) and path not in saved_modules(adapter):
            rank, _ = rank_and_alpha(adapter, name)
            sites.append(AdapterSite(path, rank, scaling(adapter, name)))
    if not sites and not adapter.modules_to_save:
        raise ConfigError(
            f"target_modules: {shown(adapter.target_modules)} matches no module of this model; there are "
            f"{', '.join(_endings(config))}"
        )
    tied_targets = [site.path for site in sites if site.path in TABLES]
    if adapter.ensure_weight_tying and config.tie_word_embeddings and tied_targets:
        raise ConfigError(f"ensure_weight_tying: not supported with adapters on {tied_targets}; use modules_to_save")
    return sites


def saved_modules(adapter: AdapterConfig) -> tuple[str, ...]:
    """The modules that are trained whole, by their path in the model."""
    return tuple(dict.fromkeys(name.removeprefix("model.") for name in adapter.modules_to_save or ()))


def fresh_adapter(
    config: ModelConfig,
    new_token_ids: Sequence[int] = (),
    *,
    target_modules: Sequence[str] | str | None = None,
    bias: str = "none",
    layers_to_transform: int | Sequence[int] | None = None,
    modules_to_save: Sequence[str] | None = None,
    rank_pattern: Mapping[str, int] | None = None,
    alpha_pattern: Mapping[str, float] | None = None,
    trainable_token_indices: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    **others: Any,
) -> AdapterConfig:
    """The settings of a fresh adapter, from `get_peft_model`'s arguments, checked against the model.

    Args:
        config: the model's, with its new tokens.
        new_token_ids: their ids, whose rows are trained.
        target_modules: None: every projection, by name.
        bias: "none".
        layers_to_transform: as PEFT's, like those below.
        modules_to_save: likewise.
        rank_pattern: likewise.
        alpha_pattern: likewise.
        trainable_token_indices: likewise.
        others: fields of `AdapterConfig` as they are.

    Raises:
        ConfigError: a value that is not supported, or names that no module has.
    """
    if bias != "none":
        raise ConfigError(f"bias: expected 'none', given {shown(bias)}")
    if target_modules is None:
        target_modules = [part for group in config.groups.values() for part, _ in group.parts]
    try:
        adapter = AdapterConfig(
            target_modules=target_modules if isinstance(target_modules, str) else list(target_modules),
            layers_to_transform=_listed(layers_to_transform),
            modules_to_save=None if modules_to_save is None else list(modules_to_save),
            rank_pattern=dict(rank_pattern or {}),
            alpha_pattern=dict(alpha_pattern or {}),
            trainable_token_indices=_token_ids(trainable_token_indices),
            **others,
        )
    except ConvertError as error:
        raise ConfigError(str(error)) from error
    _check_names(adapter, config)
    adapter = training_new_tokens(adapter, config, new_token_ids)
    odd = [site.rank for site in check_adapter(adapter, config, new_token_ids) if site.rank % 2]
    if odd and adapter.init_lora_weights == "orthogonal":
        raise ConfigError(f"init_lora_weights 'orthogonal': expected an even rank, given {odd[0]}")
    return adapter


def check_adapter(
    adapter: AdapterConfig, config: ModelConfig, new_token_ids: Sequence[int] = (), where: str | Path = "adapter"
) -> list[AdapterSite]:
    """Where an adapter attaches, once its settings fit the model.

    Args:
        adapter: PEFT's settings.
        config: the model's, with all rows that adapter and new tokens add.
        new_token_ids: tokens whose rows must be trained.
        where: the adapter's folder, for messages.

    Raises:
        ConfigError: as `adapter_sites` and `trained_rows`; or rows of new tokens that are not trained.
    """
    sites = adapter_sites(adapter, config)
    trained = {index for ids in trained_rows(adapter, config).values() for index in ids}
    untrained = sorted(set(new_token_ids) - trained)
    if untrained and not set(saved_modules(adapter)) & set(TABLES):
        raise ConfigError(
            f"{where}: the adapter does not train the rows of the new tokens with the ids {untrained}; start a fresh "
            "adapter, or leave new_tokens out"
        )
    return sites


def _check_names(adapter: AdapterConfig, config: ModelConfig) -> None:
    """Refuse names in a fresh adapter's settings that match nothing; PEFT passes over them."""
    family = family_for({"model_type": config.model_type})
    adapted = [family.module_name(site.path) for site in adapter_sites(adapter, config)]
    modules = [family.module_name(path) for path in _candidates(config)]
    listed = adapter.target_modules if isinstance(adapter.target_modules, list) else []
    unknown = [name for name in listed if not any(f".{module}".endswith(f".{name}") for module in modules)]
    if unknown:
        raise ConfigError(
            f"target_modules: expected names of modules, given {shown(unknown)}, which none has; there are "
            f"{', '.join(_endings(config))}"
        )
    layers = adapter.layers_to_transform if isinstance(adapter.layers_to_transform, list) else []
    if beyond := [layer for layer in layers if layer >= config.num_hidden_layers]:
        last = config.num_hidden_layers - 1
        raise ConfigError(f"layers_to_transform: expected layers from 0 to {last}, given {shown(beyond)}")
    for field in ("rank_pattern", "alpha_pattern"):
        unknown = [
            pattern
            for pattern in getattr(adapter, field)
            if not any(match(rf"(.*\.)?({pattern})$", name) for name in adapted)
        ]
        if unknown:
            raise ConfigError(
                f"{field}: expected names or patterns of modules that get an adapter, given {shown(unknown)}, which "
                f"match none; there are {', '.join(_endings(config))}"
            )


def _candidates(config: ModelConfig) -> list[WeightPath]:
    """The paths of all modules that can have an adapter, in the order of the model."""
    inside = [WeightPath(None, group.block, part, "") for group in config.groups.values() for part, _ in group.parts]
    layers = [path.in_layer(index) for index in range(config.num_hidden_layers) for path in inside]
    return [WeightPath(None, "", EMBEDDING, ""), *layers, WeightPath(None, "", HEAD, "")]


def _endings(config: ModelConfig) -> list[str]:
    return [*(part for group in config.groups.values() for part, _ in group.parts), *TABLES]


def layer_signatures(sites: Sequence[AdapterSite], layers: int) -> list[tuple[Any, ...]]:
    """What each layer's adapters must share with another's for the two to be stacked."""
    found: list[list[Any]] = [[] for _ in range(layers)]
    for site in sites:
        if site.path.layer is not None:
            found[site.path.layer].append((site.path.inside, site.rank, site.scaling))
    return [tuple(entries) for entries in found]


def _token_ids(indices: Sequence[int] | Mapping[str, Sequence[int]] | None) -> list[int] | dict[str, list[int]] | None:
    if isinstance(indices, Mapping):
        return {name: list(ids) for name, ids in indices.items()}
    return None if indices is None else list(indices)


def _listed(layers: int | Sequence[int] | None) -> list[int] | None:
    return None if layers is None else [layers] if isinstance(layers, int) else list(layers)
