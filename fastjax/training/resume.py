"""Going on from a checkpoint: which one, and what may differ between its run and this one.

What decides the shape or meaning of the state must be equal; anything else may change and is told.
"""

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from rich.console import Console

from convert.checkpoint import WEIGHT_FILES
from fastjax.errors import ConfigError, TrainingError
from fastjax.training.checkpoint import Checkpoints, Progress
from fastjax.training.config import TrainConfig
from fastjax.training.metrics import read_rows
from fastjax.training.run_folder import RunFolder, settings_text

#: Keys whose change makes the state another one.
FIXED = (
    "model.max_seq_length",
    "model.dtype",
    "model.param_dtype",
    "model.float32_modules",
    "model.load_in_4bit",
    "model.full_finetuning",
    "model.new_tokens",
    "model.rope_scaling",
    "lora",
    "optimizer.name",
    "training.seed",
)
#: Keys that say how a run is done and shown, not what it computes.
FREE = ("output", "training.logging_steps", "training.per_device_eval_batch_size", "data.cache_dir", "model.model_name")
#: Of these the key that the result depends on.
CHOICE = "output.load_best_model_at_end"
#: Read as the product, the rows of a step.
BATCH = ("training.per_device_train_batch_size", "training.gradient_accumulation_steps")


class Earlier(NamedTuple):
    """A checkpoint to go on from.

    Attributes:
        where: its folder.
        progress: of its run.
        config: the settings of its run.
        model: fingerprint of the base model.
        data: fingerprint of the training data.
        position: how far the data were used.
    """

    where: Path
    progress: Progress
    config: Mapping[str, Any]
    model: str
    data: str
    position: Mapping[str, Any]


def newest(checkpoints: Checkpoints, before: int | None = None) -> Earlier | None:
    """The newest checkpoint whose description can be read.

    Args:
        checkpoints: of the run.
        before: only those of earlier steps; None: all.

    Raises:
        ConfigError: it is of another version of fastjax.
    """
    for step in checkpoints.steps():
        if before is not None and step >= before:
            continue
        try:
            found = checkpoints.metadata(step)
        except ConfigError:
            raise
        except Exception:  # whatever Orbax finds wrong with what someone has damaged
            continue
        named = {name: found[name] for name in ("config", "model", "data", "position")}
        return Earlier(checkpoints.folder / str(step), Progress(**found["progress"]), **named)
    return None


def restore(checkpoints: Checkpoints, earlier: Earlier, like: Any, console: Console) -> tuple[Earlier, Any]:
    """The state of a checkpoint, or of the newest before it that can be read.

    Args:
        checkpoints: of the run.
        earlier: the checkpoint.
        like: a state with the arrays' shapes, dtypes and places.
        console: for a warning.

    Returns:
        The checkpoint that was read, and its state.

    Raises:
        ConfigError: its arrays are others.
        TrainingError: no checkpoint can be read.
    """
    while True:
        try:
            return earlier, checkpoints.load(earlier.progress.step, like)
        except ConfigError:
            raise
        except Exception as error:
            reason = f"{earlier.where} cannot be read: {' '.join(str(error).split())[:300]}"
            before = newest(checkpoints, earlier.progress.step)
            if before is None:
                raise TrainingError(f"{reason}; there is no earlier checkpoint") from error
            console.print(f"warning: {reason}; going on from {before.where}", style="yellow", markup=False)
            earlier = before


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Settings that differ, by their full name: (old, new).

    Args:
        old: sections and keys.
        new: the same.
        prefix: of the names.
    """
    found = {}
    for key in [*old, *(key for key in new if key not in old)]:
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping) and not prefix:
            found |= differences(before, after, f"{key}.")
        elif before != after:
            found[prefix + key] = (before, after)
    return found


def finished(folder: RunFolder, config: TrainConfig) -> bool:
    """Whether the run in a folder is over, and these settings would give the same result.

    Args:
        folder: of the run.
        config: the settings to go on with.
    """
    rows = read_rows(folder.metrics) if folder.result.is_dir() else []
    return bool(rows) and rows[-1].get("event") == "finished" and _changes_of_result(folder, config) == {}


def check_result(folder: RunFolder, config: TrainConfig) -> None:
    """Refuse to begin again, without a checkpoint to go on from, where an earlier result would be replaced.

    Args:
        folder: of the run.
        config: its settings.

    Raises:
        ConfigError: there is a result and `overwrite_output_dir` is not set; the settings that differ are named.
    """
    if not folder.result.exists() or config.output.overwrite_output_dir:
        return
    advice = "name another folder, or replace the result (output.overwrite_output_dir: true)"
    if changed := _changes_of_result(folder, config):
        raise ConfigError(
            f"--resume: expected the settings of {folder.result}, which is finished and has no checkpoint to go on "
            f"from with others: {_listed(changed)}. Go back to them, {advice}"
        )
    raise ConfigError(
        f"--resume: expected a checkpoint in {folder.checkpoints}, given none beside {folder.result}; {advice}"
    )


def _changes_of_result(folder: RunFolder, config: TrainConfig) -> dict[str, tuple[Any, Any]] | None:
    """What differs from the settings in a folder, but what the result does not depend on; None: there are none."""
    old, new = folder.read_settings(), yaml.safe_load(settings_text(config))
    if old is None:
        return None
    return {name: pair for name, pair in differences(old, new).items() if name == CHOICE or not _among(name, FREE)}


def check_settings(earlier: Earlier, new: Mapping[str, Any]) -> list[str]:
    """Compare the settings of a checkpoint with those of the run that goes on from it.

    Args:
        earlier: the checkpoint.
        new: the settings of the run.

    Returns:
        A line for each setting that differs and may.

    Raises:
        ConfigError: settings that must be equal are not, all of them named.
    """
    old = earlier.config
    changed = differences(old, new)
    told = {name: pair for name, pair in changed.items() if not _among(name, FREE)}
    fixed = {name: pair for name, pair in told.items() if _among(name, FIXED)}
    rows = [math.prod(int(_value(settings, name) or 1) for name in BATCH) for settings in (old, new)]
    if rows[0] != rows[1]:
        fixed["the rows of a step"] = (rows[0], rows[1])
    if fixed:
        raise ConfigError(
            f"{earlier.where} is a checkpoint of another configuration: {_listed(fixed)}. Go on with its own settings, "
            "or start a new run in another folder"
        )
    return [f"{name}: {before!r} → {after!r}" for name, (before, after) in told.items()]


def check_identity(earlier: Earlier, model: str, data: str) -> None:
    """Refuse to go on with another model or other data.

    Args:
        earlier: the checkpoint.
        model: fingerprint of the run's base model.
        data: fingerprint of its training data.

    Raises:
        ConfigError: one of them is another.
    """
    if earlier.model != model:
        raise ConfigError(
            f"model.model_name: expected the base model of {earlier.where}, given one with another config.json or "
            "other weight files"
        )
    if earlier.data != data:
        raise ConfigError(
            f"data.train: expected the data of {earlier.where}, given other rows, of which its position says nothing; "
            "to train on, start a new run from what was learnt (lora.adapter, or model.model_name)"
        )


def model_fingerprint(folder: str | Path) -> str:
    """A short name for a model folder's contents: its config.json, and the names and sizes of its weights.

    Args:
        folder: in Hugging Face format.
    """
    digest = hashlib.sha256()
    for file in sorted(f for pattern in ("config.json", *WEIGHT_FILES) for f in Path(folder).glob(pattern)):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        if file.name == "config.json":
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _value(settings: Mapping[str, Any], name: str) -> Any:
    section, _, key = name.partition(".")
    return settings.get(section, {}).get(key)


def _listed(changed: Mapping[str, tuple[Any, Any]]) -> str:
    return "; ".join(f"{name}: expected {a!r}, given {b!r}" for name, (a, b) in changed.items())


def _among(name: str, keys: tuple[str, ...]) -> bool:
    return any(name == key or name.startswith(f"{key}.") for key in keys)
