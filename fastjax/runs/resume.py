"""The checkpoint that a run resumes from: the newest that can be read."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rich.console import Console

from fastjax.errors import TrainingError
from fastjax.runs.identity import Identity
from fastjax.runs.messages import warn
from fastjax.training.cadence import Progress
from fastjax.training.checkpoint import Checkpoints
from fastjax.training.checkpoint_store import METADATA, UNCHECKED_FORMAT, Unreadable

State = TypeVar("State")


class ResumePoint(NamedTuple):
    """A checkpoint to resume from.

    Attributes:
        where: its folder.
        checked: whether it has checksums.
        progress: of its run.
        config: the settings of its run.
        identity: fingerprints of its run's inputs.
        position: in the data.
        checkpointing: policy of rematerialisation; None: an earlier version did not keep it, or no step was taken.
        replicas: parts in which the devices took a step's rows; None: no step was taken.
        now: the time that the chat template told in its data; None: none, or an earlier version did not keep it.
    """

    where: Path
    checked: bool
    progress: Progress
    config: Mapping[str, Any]
    identity: Identity
    position: Mapping[str, Any]
    checkpointing: str | None = None
    replicas: int | None = None
    now: str | None = None


def newest(checkpoints: Checkpoints, console: Console, before: int | None = None) -> ResumePoint | None:
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
            stored = checkpoints.metadata(step)
            named = {name: stored[name] for name in ("config", "position")}
            identity = Identity(stored["model"], stored["data"], *map(stored.get, Identity._fields[2:]))
        except Unreadable as error:
            damaged.append(error)
            continue
        except KeyError as error:  # of the format without a checksum
            damaged.append(Unreadable(where, f"{METADATA} is damaged: {error} is missing"))
            continue
        for error in damaged:
            warn(console, f"{error}; looking at the one before")
        checked, progress = stored["format"] != UNCHECKED_FORMAT, Progress(**stored["progress"])
        named |= {"checkpointing": stored.get("checkpointing"), "replicas": stored.get("replicas", 1)}
        named |= {"now": stored.get("now")}
        return ResumePoint(where, checked, progress, identity=identity, **named)
    if damaged:
        others = f"; nor can the {len(damaged) - 1} before it" if len(damaged) > 1 else ""
        raise TrainingError(
            f"{damaged[0]}{others}. Name another folder, or begin again in its place "
            "(output.overwrite_output_dir: true, without --resume)"
        )
    return None


def restore(
    checkpoints: Checkpoints, earlier: ResumePoint, load: Callable[[int], State], console: Console
) -> tuple[ResumePoint, State]:
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
