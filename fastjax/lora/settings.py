"""The settings of a fresh adapter: the arguments of `get_peft_model` and the section `lora` of a run's file.

Both take names, defaults and descriptions from `LoraSettings`; a model turns them into PEFT's own settings
(`convert.adapters.AdapterConfig`), which are what an adapter's folder holds. No JAX.
"""

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Interval

from convert.adapter_config import CONFIG, SCORED, tuned_name
from convert.adapters import AdapterConfig
from convert.errors import ConvertError, shown
from convert.families import family_for
from convert.model.config import ModelConfig
from convert.model.paths import SCORE, TABLES
from convert.patterns import match
from fastjax.errors import ConfigError
from fastjax.limits import MAX_INTEGER, MAX_RANK
from fastjax.lora.sites import AdapterSite, adapter_sites, candidates, module_names, parameters, projections
from fastjax.lora.tables import saved_modules, trained_tables, with_new_rows
from fastjax.options import describe, fits, hints_of


@dataclasses.dataclass(frozen=True)
class LoraSettings:
    """A fresh adapter, with PEFT's names and meanings."""

    r: Annotated[int, Interval(ge=1, le=MAX_RANK)] = 16
    """rank."""
    lora_alpha: float = 16
    """scale: the adapter's product is multiplied by lora_alpha / r."""
    lora_dropout: Annotated[float, Interval(ge=0, lt=1)] | None = None
    """probability with which an input of an adapter is zeroed in training; null: 0, or that of the adapter to start
    from."""
    target_modules: list[str] | str | None = None
    """names of the projections that get an adapter; null: all of them. A name here, or a pattern below, that no module
    has is an error."""
    target_parameters: list[str] | None = None
    """of a mixture of experts: the ends of names of experts' matrices, which get an adapter for each expert,
    "mlp.experts.gate_up_proj" (gate and up, as one) and "mlp.experts.down_proj", and of the router's, such as
    "mlp.gate.weight"; null: none."""
    use_rslora: bool = False
    """scale by lora_alpha / √r instead."""
    use_dora: bool = False
    """train the magnitude of each weight row apart from its direction (DoRA)."""
    rank_pattern: dict[str, Annotated[int, Interval(ge=1, le=MAX_RANK)]] | None = None
    """ranks for modules (and target_parameters) that match a name or pattern, in place of r."""
    alpha_pattern: dict[str, float] | None = None
    """the same for lora_alpha."""
    layers_to_transform: list[int] | int | None = None
    """indices of the layers that get adapters; null: all."""
    modules_to_save: list[str] | None = None
    """modules trained whole and saved with the adapter: embed_tokens, lm_head; score, which a reward model always
    trains."""
    trainable_token_indices: list[int] | dict[str, list[int]] | None = None
    """ids of tokens whose rows of the embedding (and of a head that is tied to it) are trained, and no others; or ids
    for each table, {embed_tokens: [7], lm_head: [7]}. The rows of model.new_tokens are always among them, unless
    modules_to_save trains the whole table."""
    ensure_weight_tying: bool = False
    """with tied embeddings, modules_to_save trains one array for both uses, not two."""
    init_lora_weights: bool | Literal["gaussian", "orthogonal"] = True
    """how A and B start: true (B is zero), false, "gaussian" or "orthogonal"."""
    bias: Literal["none"] = "none"
    """which biases are trained; only "none"."""
    random_state: Annotated[int, Interval(ge=0, le=MAX_INTEGER)] = 3407
    """seed of the adapter's start."""


def fresh_adapter(
    config: ModelConfig,
    settings: LoraSettings,
    new_token_ids: Sequence[int] = (),
    *,
    base_model_name_or_path: str | None = None,
    revision: str | None = None,
) -> AdapterConfig:
    """PEFT's settings of a fresh adapter, checked against the model.

    Args:
        config: the model's, with its new tokens.
        settings: of the adapter; sequences and mappings of any kind.
        new_token_ids: ids of the new tokens, whose rows are trained.
        base_model_name_or_path: the model's folder or name on the hub.
        revision: of that name.

    Raises:
        ConfigError: a value that is not supported, or names that no module has.
    """
    if settings.bias != "none":
        raise ConfigError(f"bias: expected 'none', got {shown(settings.bias)}")
    if not fits(settings.random_state, seed := hints_of(LoraSettings)["random_state"]):
        raise ConfigError(f"random_state: expected {describe(seed)}, got {shown(settings.random_state, 80)}")
    names = [field.name for field in dataclasses.fields(LoraSettings) if field.name not in ("bias", "random_state")]
    values = {name: _plain(getattr(settings, name)) for name in names}
    if settings.target_modules is None:
        values["target_modules"] = projections(config)
    if isinstance(settings.layers_to_transform, int):
        values["layers_to_transform"] = [settings.layers_to_transform]
    values |= {name: values[name] or {} for name in ("rank_pattern", "alpha_pattern")}
    values["lora_dropout"] = 0.0 if settings.lora_dropout is None else settings.lora_dropout
    if config.scored:
        saved = [name for name in values["modules_to_save"] or () if name != SCORE]
        values |= {"modules_to_save": [*saved, SCORE], "task_type": SCORED}
    try:
        adapter = AdapterConfig(base_model_name_or_path=base_model_name_or_path, revision=revision, **values)
    except ConvertError as error:
        raise ConfigError(str(error).removeprefix(f"{CONFIG}: ")) from error
    _check_names(adapter, config)
    adapter = with_new_rows(adapter, config, new_token_ids)
    odd = [site.rank for site in check_adapter(adapter, config, new_token_ids) if site.rank % 2]
    if odd and adapter.init_lora_weights == "orthogonal":
        raise ConfigError(f"init_lora_weights 'orthogonal': expected an even rank, got {odd[0]}")
    return adapter


def tables_note(adapter: AdapterConfig, config: ModelConfig) -> str | None:
    """A sentence about embedding and head among the targets of a fresh adapter; None: they are none.

    Args:
        adapter: PEFT's settings.
        config: the model's.
    """
    names = [site.path for site in adapter_sites(adapter, config) if site.path in TABLES]
    if not names:
        return None
    return (
        f"target_modules: low-rank adapters on {' and '.join(names)}, as in PEFT; Unsloth trains the whole table: "
        f"for that leave it out here and set modules_to_save: [{', '.join(names)}]"
    )


def check_adapter(
    adapter: AdapterConfig, config: ModelConfig, new_token_ids: Sequence[int] = (), where: str | Path = "adapter"
) -> list[AdapterSite]:
    """The modules with an adapter, once its settings fit the model.

    Args:
        adapter: PEFT's settings.
        config: the model's, with all rows that adapter and new tokens add.
        new_token_ids: tokens whose rows must be trained.
        where: the adapter's folder, for messages.

    Raises:
        ConfigError: as `adapter_sites` and `trained_tables`; an adapter of another task; or rows of new tokens that
            are not trained.
    """
    if (adapter.task_type == SCORED) != config.scored:
        raise ConfigError(
            f"{where}: task_type: expected {SCORED if config.scored else 'CAUSAL_LM'} over a model with "
            f"{'a score in place of logits' if config.scored else 'logits'}, got {shown(adapter.task_type)}"
        )
    sites = adapter_sites(adapter, config)
    trained = {index for table in trained_tables(adapter, config) for index in table.ids or ()}
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
    targeted = [tuned_name(site.path, family) for site in adapter_sites(adapter, config)]
    modules = [family.module_name(path) for path in candidates(config) if not path.of_experts and not path.is_router]
    known = ", ".join(module_names(config))
    listed = adapter.target_modules if isinstance(adapter.target_modules, list) else []
    unknown = [name for name in listed if not any(f".{module}".endswith(f".{name}") for module in modules)]
    if unknown:
        raise ConfigError(
            f"target_modules: expected names of modules, got {shown(unknown)}, which none has; there are {known}"
        )
    listed, found = adapter.target_parameters or [], parameters(config)
    unknown = [name for name in listed if not any(f".{parameter}".endswith(f".{name}") for parameter in found)]
    if unknown:
        there = f"there are {', '.join(found[:3])} and so on" if found else "the model has no mixture of experts"
        raise ConfigError(
            f"target_parameters: expected the ends of parameters' names, got {shown(unknown)}, which none has; {there}"
        )
    layers = adapter.layers_to_transform if isinstance(adapter.layers_to_transform, list) else []
    if beyond := [layer for layer in layers if layer >= config.num_hidden_layers]:
        last = config.num_hidden_layers - 1
        raise ConfigError(f"layers_to_transform: expected layers from 0 to {last}, got {shown(beyond)}")
    for field in ("rank_pattern", "alpha_pattern"):
        patterns = getattr(adapter, field)
        unknown = [name for name in patterns if not any(match(rf"(.*\.)?({name})$", module) for module in targeted)]
        if unknown:
            there = dict.fromkeys(re.sub(r".*\.layers\.\d+\.", "", name) for name in targeted)
            raise ConfigError(
                f"{field}: expected names or patterns of modules that get an adapter, got {shown(unknown)}, which "
                f"match none; there are {', '.join(there)}"
            )


def _plain(value: Any) -> Any:
    """Any mapping as a dictionary, any other collection as a list."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return list(value) if isinstance(value, Collection) and not isinstance(value, str) else value
