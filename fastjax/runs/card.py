"""A run's data, figures and settings, for the model cards of what it leaves."""

import dataclasses
import os
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from convert.card import Training, is_name
from fastjax.data.settings import DataSource
from fastjax.training.config import TrainConfig
from fastjax.training.metrics import read_rows
from fastjax.training.report.facts import headline
from fastjax.training.report.history import History
from fastjax.training.report.settings import default_settings

#: Settings that the card tells elsewhere, or that say nothing of the result.
_TOLD = {"model.model_name", "data.train", "data.eval", "data.cache_dir", "lora.adapter"}


def training_of(
    config: TrainConfig, metrics: Path, statistics: Mapping[str, str], until: int | None = None
) -> Training:
    """The training of a run, as its model cards tell it.

    Args:
        config: the settings.
        metrics: the file of its rows.
        statistics: data set → its statistics in words.
        until: the step of the checkpoint that is told; None: the last.
    """
    rows = [row for row in read_rows(metrics) if until is None or row["step"] <= until] if metrics.is_file() else []
    lines = [(name, _names(given)) for name, given in (("train", config.data.train), ("held out", config.data.eval))]
    table = [
        (f"data, {name}", f"{named}; {statistics[name]}" if name in statistics else named) for name, named in lines
    ]
    facts = headline(History.from_rows(rows))
    table += [(fact.label, fact.value + (f" ({fact.note})" if fact.note else "")) for fact in facts]
    table.append(("with", f"fastjax {version('fastjax')}, jax {version('jax')}"))
    shown = ["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in table if value)]
    settings = yaml.safe_dump(_changed(config), sort_keys=False, allow_unicode=True).strip()
    text = "\n".join([*shown, "", "Settings that are not the defaults:", "", "```yaml", settings, "```"])
    named = dict.fromkeys(path for given in (config.data.train, config.data.eval) for path in _paths(given))
    return Training(text, tuple(path for path in named if is_name(path)))


def _paths(given: Any) -> list[str]:
    """The names and files of a setting of data."""
    if given is None:
        return []
    if isinstance(given, list | tuple):
        return [path for one in given for path in _paths(one)]
    return [given.path if isinstance(given, DataSource) else str(given)]


def _names(given: Any) -> str:
    """The data in words; of files their names alone."""
    paths = _paths(given)
    return ", ".join(f"`{path if is_name(path) else os.path.basename(path.rstrip('/'))}`" for path in paths)


def _changed(config: TrainConfig) -> dict[str, dict[str, Any]]:
    """The settings that are not the defaults, but those of files and folders."""
    defaults, found = default_settings(), {}
    for section, values in dataclasses.asdict(config).items():
        if section == "output":
            continue
        changed = {
            key: value
            for key, value in values.items()
            if value != defaults[section].get(key) and f"{section}.{key}" not in _TOLD
        }
        if changed:
            found[section] = changed
    return found
