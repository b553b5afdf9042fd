"""Going on from a checkpoint: which one, and what may differ between its run and this one.

What decides the shape or meaning of the state must be equal; anything else may change and is told.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rich.console import Console

from convert.checkpoint import WEIGHT_FILES
from convert.errors import shown
from fastjax import strict_yaml
from fastjax.errors import ConfigError, TrainingError
from fastjax.training.checkpoint import Checkpoints, Progress
from fastjax.training.config import TrainConfig
from fastjax.training.identity import Identity
from fastjax.training.metrics import read_rows
from fastjax.training.run_folder import RunFolder, settings_text
from fastjax.training.stored import METADATA, UNCHECKED_FORMAT, Unreadable

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
FREE = (
    "output",
    "training.logging_steps",
    "training.per_device_eval_batch_size",
    "data.cache_dir",
    "model.model_name",
    "model.allow_nonfinite",
)
#: Of these the key that the result depends on.
CHOICE = "output.load_best_model_at_end"
#: Read as the product, the rows of a step.
BATCH = ("training.per_device_train_batch_size", "training.gradient_accumulation_steps")


State = TypeVar("State")


class Earlier(NamedTuple):
    """A checkpoint to go on from.

    Attributes:
        where: its folder.
        checked: whether it has checksums.
        progress: of its run.
        config: the settings of its run.
        identity: fingerprints of what its run began with.
        position: how far the data were used.
    """

    where: Path
    checked: bool
    progress: Progress
    config: Mapping[str, Any]
    identity: Identity
    position: Mapping[str, Any]


def newest(checkpoints: Checkpoints, console: Console, before: int | None = None) -> Earlier | None:
    """The newest checkpoint whose description can be read; a later one that is damaged is named.

    Args:
        checkpoints: of the run.
        console: for warnings.
        before: only those of earlier steps; None: all.

    Raises:
        ConfigError: it is of another version of fastjax.
        TrainingError: there are checkpoints, and all are damaged.
    """
    damaged = []
    for step in checkpoints.steps():
        if before is not None and step >= before:
            continue
        where = checkpoints.folder / str(step)
        try:
            found = checkpoints.metadata(step)
            named = {name: found[name] for name in ("config", "position")}
            identity = Identity(found["model"], found["data"], *map(found.get, Identity._fields[2:]))
        except Unreadable as error:
            damaged.append(error)
            continue
        except KeyError as error:  # of the format without a checksum
            damaged.append(Unreadable(where, f"{METADATA} is damaged: {error} is missing"))
            continue
        for error in damaged:
            warn(console, f"{error}; looking at the one before")
        checked, progress = found["format"] != UNCHECKED_FORMAT, Progress(**found["progress"])
        return Earlier(where, checked, progress, identity=identity, **named)
    if damaged:
        others = f"; nor can the {len(damaged) - 1} before it" if len(damaged) > 1 else ""
        raise TrainingError(
            f"{damaged[0]}{others}. Name another folder, or begin again in its place "
            "(output.overwrite_output_dir: true, without --resume)"
        )
    return None


def restore(
    checkpoints: Checkpoints, earlier: Earlier, load: Callable[[int], State], console: Console
) -> tuple[Earlier, State]:
    """The state of a checkpoint, or of the newest before it that can be read.

    Args:
        checkpoints: of the run.
        earlier: the checkpoint.
        load: reads the state of a step, or a part of it.
        console: for a warning.

    Returns:
        The checkpoint that was read, and its state.

    Raises:
        ConfigError: its arrays are others.
        TrainingError: no checkpoint can be read.
    """
    while True:
        try:
            state = load(earlier.progress.step)
        except Unreadable as error:
            before = newest(checkpoints, console, earlier.progress.step)
            if before is None:
                raise TrainingError(f"{error}; there is no earlier checkpoint") from error
            warn(console, f"{error}; going on from {before.where}")
            earlier = before
        else:
            if not earlier.checked:
                warn(
                    console,
                    f"{earlier.where} was written without checksums, by an earlier version: damage to it, or a base "
                    "with other values, would not be found",
                )
            return earlier, state


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


def weight_digests(result: Path) -> dict[str, str]:
    """SHA-256 of the files with weights in a result, by name.

    Args:
        result: a PEFT or model folder.
    """
    digests = {}
    for file in sorted(
        file for pattern in ("adapter_model.safetensors", *WEIGHT_FILES) for file in result.glob(pattern)
    ):
        with open(file, "rb") as stream:
            digests[file.name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return digests


def damage(folder: RunFolder) -> str | None:
    """What has become of the weights that a finished run has written; None: nothing, as far as is known.

    Args:
        folder: of the run.
    """
    written, found = read_rows(folder.metrics)[-1].get("files") or {}, weight_digests(folder.result)
    for name, digest in written.items():
        if found.get(name) != digest:
            return f"{name} is not as it was written" if name in found else f"{name} is missing"
    return None


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
    old, new = folder.read_settings(), strict_yaml.parse(settings_text(config))
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
    return [f"{name}: {shown(before)} → {shown(after)}" for name, (before, after) in told.items()]


def warn(console: Console, text: str) -> None:
    """Print a warning.

    Args:
        console: where to.
        text: the warning.
    """
    console.print(f"warning: {text}", style="yellow", highlight=False, markup=False, soft_wrap=True)


def _value(settings: Mapping[str, Any], name: str) -> Any:
    section, _, key = name.partition(".")
    return settings.get(section, {}).get(key)


def _listed(changed: Mapping[str, tuple[Any, Any]]) -> str:
    return "; ".join(f"{name}: expected {shown(a)}, given {shown(b)}" for name, (a, b) in changed.items())


def _among(name: str, keys: tuple[str, ...]) -> bool:
    return any(name == key or name.startswith(f"{key}.") for key in keys)
