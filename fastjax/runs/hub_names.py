"""Folders of a run's model and adapter, and their names on the hub, each pinned to one commit.

Nothing here imports JAX.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from convert.errors import ConvertError, shorten
from convert.hub import Source, fetch, split
from fastjax.errors import ConfigError
from fastjax.training.config import TrainConfig

_WANTED = {
    "model.model_name": "a folder in Hugging Face format or a name on the hub, org/model",
    "lora.adapter": "a PEFT folder or a name on the hub, org/adapter",
}


def located(config: TrainConfig, key: str, *, weights: bool = True) -> Source:
    """The folder of a model or an adapter, downloaded if it is a name on the hub.

    Args:
        config: the settings.
        key: "model.model_name" or "lora.adapter".
        weights: whether its weights are wanted too.

    Raises:
        ConfigError: it is not to be found.
    """
    section, _, field = key.partition(".")
    name = getattr(getattr(config, section), field)
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
        earlier: those of the resumed run, by section: a name without a revision means its commit.

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
