"""A run's model and adapter, opened: config.json, tokenizer, headers and settings, before data or tensors are read.

A run and its preview begin with this, so a preview refuses what the run would. Each folder is opened here, once: its
fingerprints and its weights come from the open folder. Names on the hub are pinned to one commit. Nothing here imports
JAX.
"""

import contextlib
import dataclasses
import operator
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from convert.adapters import CONFIG as ADAPTER_CONFIG
from convert.adapters import config_from_json
from convert.checkpoint import CONFIG, WEIGHT_FILES
from convert.errors import ConvertError, shorten
from convert.families.mapping import with_score
from convert.files import read_json
from convert.hub import Source, fetch, split
from convert.inspect import Inspection
from convert.model.config import ModelConfig
from convert.model.paths import SCORE, TABLES
from convert.trained_over import base_notes
from fastjax.data.tokenizer import own_tokenizer
from fastjax.errors import ConfigError
from fastjax.execution.opening import OpenModel, open_folder
from fastjax.execution.options import LoadOptions
from fastjax.lora.fit import OpenAdapter, open_fitting
from fastjax.lora.settings import check_adapter, fresh_adapter, tables_note
from fastjax.lora.tables import adapter_rows, check_saved
from fastjax.training.config import TrainConfig

_WANTED = {
    "model.model_name": "a folder in Hugging Face format or a name on the hub, org/model",
    "lora.adapter": "a PEFT folder or a name on the hub, org/adapter",
}


def open_model(config: TrainConfig, *, weights: bool = True) -> OpenModel:
    """Open the model and the adapter of a run.

    Args:
        config: the settings.
        weights: open the files of weights of names on the hub too, which downloads them; those of folders always are.

    Raises:
        ConfigError: a model or adapter that is not to be found, without a tokenizer that can be loaded, or that does
            not suit the settings.
        ConvertError: what is wrong with their folders.
    """
    source = located(config, "model.model_name", weights=weights)
    opened = _opened(config, source, weights=weights or source.name is None)
    return _with_adapter(config, opened, weights=weights)


def open_shapes(config: TrainConfig) -> OpenModel:
    """Open as much of a run's model as its shapes take; what `open_model` would refuse is refused.

    The folder may lack weights, which are then taken to be as config.json says, and a tokenizer. A model on the hub is
    not downloaded but for its small files, an adapter is.

    Args:
        config: the settings.
    """
    source = located(config, "model.model_name", weights=False)
    there = source.name is None and any(any(source.folder.glob(pattern)) for pattern in WEIGHT_FILES)
    return _with_adapter(config, _opened(config, source, weights=there, tokenizer=False), weights=True)


def _opened(config: TrainConfig, source: Source, **needed: bool) -> OpenModel:
    with within("model", config.model):
        return open_folder(source, config.model, **needed)


def _with_adapter(config: TrainConfig, opened: OpenModel, *, weights: bool) -> OpenModel:
    """A model with the adapter to start from; the settings of a fresh one are looked at."""
    _check_routers(config, opened)
    if config.lora.adapter is not None:
        return dataclasses.replace(opened, adapter=_open_adapter(config, opened, weights))
    trained = _trained_config(config, opened)
    if not config.model.full_finetuning:
        with within("lora", config.lora):
            fresh_adapter(trained, config.lora, opened.new_token_ids)
    return opened


def adapter_notes(config: TrainConfig, opened: OpenModel) -> list[str]:
    """Sentences for the user about the adapter of a run.

    Args:
        config: its settings.
        opened: its folders.
    """
    given = opened.held_as(config.model)
    if opened.adapter is not None and opened.adapter.arrays is not None and given is not None:
        adapter = opened.adapter.arrays
        notes = base_notes(adapter.config.base_model_name_or_path, adapter.over, given)
        return [f"lora.adapter: {note}" for note in notes]
    if config.lora.adapter is not None or config.model.full_finetuning:
        return []
    trained = _trained_config(config, opened)
    note = tables_note(fresh_adapter(trained, config.lora, opened.new_token_ids), trained)
    return [] if note is None else [f"lora.{note}"]


def _trained_config(config: TrainConfig, opened: OpenModel) -> ModelConfig:
    """The model's settings with the head that the run trains."""
    if not config.preferences.scores:
        if opened.config.scored:
            raise ConfigError(
                f"model.model_name: expected a model with logits with preferences.loss: "
                f"{config.preferences.loss or 'null'}, got a reward model, whose head is one score"
            )
        return opened.config
    try:
        return with_score(opened.config)
    except ConvertError as error:
        raise ConfigError(f"preferences.loss: reward: {error}") from error


def _check_routers(config: TrainConfig, opened: OpenModel) -> None:
    for name in ("router_aux_loss_coef", "router_z_loss_coef"):
        value = getattr(config.training, name)
        if value and opened.config.moe is None:
            raise ConfigError(f"training.{name}: expected 0, since the model has no mixture of experts, got {value}")


def _open_adapter(config: TrainConfig, opened: OpenModel, weights: bool) -> OpenAdapter:
    """The adapter to start from, whose settings fit the model."""
    base = _trained_config(config, opened)
    source = located(config, "lora.adapter", weights=weights)
    folder = source.folder
    if weights or source.name is None:
        allow = config.model.allow_nonfinite
        return open_fitting(folder, base, opened.new_token_ids, allow_nonfinite=allow)
    adapter, tokenizer = (
        config_from_json(read_json(folder / ADAPTER_CONFIG), folder / ADAPTER_CONFIG),
        own_tokenizer(folder),
    )
    rows = max(base.vocab_size, adapter_rows(adapter, {}, tokenizer))
    check_adapter(adapter, dataclasses.replace(base, vocab_size=rows), opened.new_token_ids, folder)
    return OpenAdapter(None, tokenizer)


def located(config: TrainConfig, key: str, *, weights: bool = True) -> Source:
    """The folder of a model or an adapter, downloaded if it is a name on the hub.

    Args:
        config: the settings.
        key: "model.model_name" or "lora.adapter".
        weights: whether its weights are wanted too.

    Raises:
        ConfigError: it is not to be inspection.
    """
    name = operator.attrgetter(key)(config)
    try:
        source = fetch(name, weights=weights)
    except ConvertError as error:
        raise ConfigError(f"{key}: expected {_WANTED[key]}: {error}") from error
    if not source.folder.is_dir():
        raise ConfigError(f"{key}: expected {_WANTED[key]}, got {shorten(name)}, which is none")
    return source


def pinned(config: TrainConfig, earlier: Mapping[str, Any] | None = None) -> TrainConfig:
    """The settings with every name on the hub at one commit, `org/model@commit`, so that a run can be resumed.

    Args:
        config: the settings.
        earlier: the resumed run's settings, by section: a name without a revision means its commit.

    Raises:
        ConfigError: a model or adapter that is not to be found, or at another commit than that of the earlier run.
    """
    keys = ["model.model_name"] if config.lora.adapter is None else ["model.model_name", "lora.adapter"]
    for key in keys:
        section, _, field = key.partition(".")
        name, revision = split(getattr(getattr(config, section), field))
        begun = (earlier or {}).get(section)
        begun = begun.get(field) if isinstance(begun, Mapping) else None
        known, commit = split(begun) if isinstance(begun, str) else (None, None)
        if revision is None and commit is not None and known == name:
            config = _replaced(config, section, field, begun)
        source = located(config, key)
        if source.name is None:
            continue
        if known == name and commit is not None and source.revision != commit:
            raise ConfigError(
                f"{key}: expected {begun}, with which the earlier run began, got {source.pinned}; leave the revision "
                "out, or start a new run in another folder"
            )
        config = _replaced(config, section, field, source.pinned)
    return config


def _replaced(config: TrainConfig, section: str, field: str, value: Any) -> TrainConfig:
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **{field: value})})


def with_refusals(inspection: Inspection) -> Inspection:
    """An inspection with what loading the folder refuses; a model without a tokenizer can be loaded here.

    Args:
        inspection: of a folder; an adapter's is compared with its base where that is a folder on this machine.
    """
    problems = list(inspection.unsupported)
    try:
        if inspection.kind == "model":
            open_folder(Source(inspection.folder), LoadOptions(), tokenizer=False)
        elif not problems:
            _check_adapter(inspection.folder)
    except (ConfigError, ConvertError) as error:
        problems.append(str(error))
    return dataclasses.replace(inspection, unsupported=tuple(dict.fromkeys(problems)))


def _check_adapter(folder: Path) -> None:
    adapter = config_from_json(read_json(folder / ADAPTER_CONFIG), folder / ADAPTER_CONFIG)
    base = adapter.base_model_name_or_path
    if base is None or not (Path(base) / CONFIG).is_file():
        check_saved(adapter, (*TABLES, SCORE))
        return
    opened = open_folder(Source(Path(base)), LoadOptions(), weights=False, tokenizer=False)
    open_fitting(folder, opened.config)


@contextlib.contextmanager
def within(name: str, section: object) -> Iterator[None]:
    """Name the section in an error that begins with one of its keys.

    Args:
        name: of the section.
        section: the section.
    """
    try:
        yield
    except ConfigError as error:
        if str(error).partition(":")[0] not in vars(section):
            raise
        raise ConfigError(f"{name}.{error}") from error
