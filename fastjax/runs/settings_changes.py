"""Changes of the settings between a run and its resumption.

Settings that decide the shape or meaning of the state must be equal; others may change, and the run says so.
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.errors import shown
from fastjax.errors import ConfigError
from fastjax.execution.options import EXECUTION, LoadOptions
from fastjax.training.report import default_settings

#: (old, new) value by the full name of a setting.
Changes = Mapping[str, tuple[Any, Any]]

#: Keys whose change makes the state another one.
FIXED = (
    *(f"model.{field.name}" for field in dataclasses.fields(LoadOptions) if field.name not in EXECUTION),
    "lora",
    "optimizer.name",
    "parallel.gradient_exchange",
    "preferences.loss",
    "training.group_by_length",
    "training.qat",
    "training.seed",
)
#: Keys of a run's output and execution, not of its computation.
FREE = (
    "output",
    "training.logging_steps",
    "training.step_timeout",
    "training.per_device_eval_batch_size",
    "data.cache_dir",
    "model.model_name",
    "model.allow_nonfinite",
)
#: Of these the key that the result depends on.
CHOICE = "output.load_best_model_at_end"
#: Compared by their product with the number of replicas, the rows of a step.
BATCH = ("training.per_device_train_batch_size", "training.gradient_accumulation_steps")


def result_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Changes:
    """Settings that differ and that the result depends on.

    Args:
        old: sections and keys.
        new: sections and keys.
    """
    changes = _differences(_flat(old), _flat(new))
    return {name: pair for name, pair in changes.items() if name == CHOICE or not _among(name, FREE)}


def check_settings(
    where: Path, old: Mapping[str, Any], new: Mapping[str, Any], replicas: tuple[int, int] | None = (1, 1)
) -> list[str]:
    """Compare the settings of a checkpoint with those of the run that resumes from it.

    Args:
        where: the checkpoint.
        old: its settings.
        new: the settings of the run.
        replicas: parts in which the devices of each take a step's rows; None: the checkpoint's has taken none.

    Returns:
        A line for each setting that differs and may.

    Raises:
        ConfigError: settings that must be equal are not, all of them named.
    """
    old, new = _flat(old), _flat(new)
    changes = {name: pair for name, pair in _differences(old, new).items() if not _among(name, FREE)}
    fixed = {name: pair for name, pair in changes.items() if _among(name, FIXED)}
    rows = [
        math.prod(int(settings.get(name) or 1) for name in BATCH) * count
        for settings, count in zip((old, new), replicas or (1, 1), strict=True)
    ]
    if rows[0] != rows[1]:
        fixed["the rows of a step"] = (rows[0], rows[1])
    if replicas and replicas[0] != replicas[1] and old.get("parallel.gradient_exchange") not in (None, "float32"):
        fixed["the copies of the model, which hold what was rounded off of their gradients"] = replicas
    if fixed:
        raise ConfigError(
            f"{where} is a checkpoint of another configuration: {listed(fixed)}. Go on with its own settings, "
            "or start a new run in another folder"
        )
    return [f"{name}: {shown(before)} → {shown(after)}" for name, (before, after) in changes.items()]


def listed(changes: Changes) -> str:
    """Changes in words, old settings being the expected ones."""
    return "; ".join(f"{name}: expected {shown(old)}, got {shown(new)}" for name, (old, new) in changes.items())


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by their full names, with the defaults of those that the version that wrote them did not have."""
    defaults, flat = default_settings(), {}
    for section in {**defaults, **settings}:
        keys = {**defaults.get(section, {}), **(settings.get(section) or {})}
        flat |= {f"{section}.{key}": value for key, value in keys.items()}
    return flat


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = {**old, **new}
    return {name: (old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)}


def _among(name: str, keys: tuple[str, ...]) -> bool:
    return any(name == key or name.startswith(f"{key}.") for key in keys)
