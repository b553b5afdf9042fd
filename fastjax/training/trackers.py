"""TensorBoard and Weights & Biases as sinks of a run's rows.

Both draw `train/…` and `eval/…` over the step, have the settings and the events as text, and continue the same run on
resumption. They are imported on demand. Once a run has begun their failures do not end it.
"""

import contextlib
import importlib
import json
import math
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from convert.errors import ConvertError, shown
from convert.files import atomic_file, read_json
from fastjax.errors import ConfigError
from fastjax.parallel.processes import is_primary
from fastjax.training.metrics import Row, Sink, Tolerant

RUN_ID_FILE = "wandb_run.json"
"""Keeps Weights & Biases' id of the run in the output folder."""


#: Tracker -> its module, which has the name of its package.
_NEEDS = {"tensorboard": "tensorboardX", "wandb": "wandb"}


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that cannot be imported, and Weights & Biases without a login.

    Args:
        names: "tensorboard" and "wandb", in any order.

    Raises:
        ConfigError: an unknown tracker, one that is not installed, or one that cannot log in.
    """
    for name in names:
        if name not in _NEEDS:
            raise ConfigError(f"output.report_to: expected some of {', '.join(_NEEDS)}, got {shown(name)}")
        library = _import(name)
        if name == "wandb" and is_primary():  # which has the trackers
            try:
                library.login()  # nothing with WANDB_MODE=offline; asks on a terminal
            except Exception as error:
                raise _not_started(error) from error


def make_trackers(
    folder: Path,
    run_name: str,
    config: Mapping[str, Any],
    resume_step: int | None = None,
    console: Console | None = None,
) -> list[Sink]:
    """Start the trackers of `output.report_to`, or resume them.

    Args:
        folder: the run's output folder, which exists; TensorBoard's files go into `tensorboard/` in it, and Weights &
            Biases' into `wandb/`.
        run_name: the run's name.
        config: the settings, by section.
        resume_step: the step to resume from; None: a new run.
        console: for the warning when a tracker fails later; None: standard error.

    Returns:
        A sink for each name.

    Raises:
        ConfigError: a tracker that is not installed, or cannot be started (no login, no network).
    """
    kinds = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
    console, names = console or Console(stderr=True), config["output"]["report_to"]
    return [Tolerant(kinds[name](folder, run_name, config, resume_step), name, console) for name in names]


class TensorBoard:
    """Event files for `tensorboard --logdir`."""

    def __init__(self, folder: Path, run_name: str, config: Mapping[str, Any], resume_step: int | None):
        """Open a new event file; with a resume step TensorBoard hides later steps of older files."""
        library = _import("tensorboard")
        purge = None if resume_step is None else resume_step + 1
        self._writer = library.SummaryWriter(str(folder / "tensorboard"), purge_step=purge, max_queue=1000)
        self._summary = importlib.import_module("tensorboardX.proto.summary_pb2").Summary
        text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
        self._text("config", f"run: {run_name}\n{text}", resume_step or 0)

    def write(self, row: Row) -> None:
        """Add the row's figures at its step, in one record: each record costs as much as a line of JSON."""
        figures = [self._summary.Value(tag=name, simple_value=value) for name, value in _figures(row).items()]
        if figures:
            self._writer.file_writer.add_summary(self._summary(value=figures), row["step"])
        if "event" in row:
            self._text("events", f"{row['event']}: {row['message']}", row["step"])

    def close(self) -> None:
        """Flush the events."""
        self._writer.close()

    def _text(self, name: str, text: str, step: int) -> None:
        """TensorBoard renders text as Markdown; indented, it is shown as it is."""
        self._writer.add_text(name, "".join(f"    {line}\n" for line in text.splitlines()), step)


class WeightsAndBiases:
    """A run on wandb.ai, or on the disk with WANDB_MODE=offline."""

    def __init__(self, folder: Path, run_name: str, config: Mapping[str, Any], resume_step: int | None):
        """Start a run, or resume the one of this folder."""
        output = config["output"]
        library = _import("wandb")
        file = folder / RUN_ID_FILE
        run_id = None
        if resume_step is not None and file.exists():
            with contextlib.suppress(ConvertError):  # damaged: a new run, rather than none
                run_id = read_json(file).get("id")
        if not isinstance(run_id, str) or not run_id:
            run_id = uuid.uuid4().hex[:12]
            with atomic_file(file) as stream:
                stream.write(json.dumps({"id": run_id}).encode())
        try:
            self._run = library.init(
                project=output.get("project") or os.environ.get("WANDB_PROJECT", "fastjax"),
                entity=output.get("entity"),
                tags=output.get("tags") or None,
                name=run_name,
                id=run_id,
                dir=str(folder),
                config=dict(config),
                resume="allow",
                settings=library.Settings(console="off"),  # it would take over the progress line's output
            )
        except Exception as error:
            raise _not_started(error) from error
        # Its own counter only rises, but a resumed run repeats the steps since its checkpoint.
        self._run.define_metric("*", step_metric="step")

    def write(self, row: Row) -> None:
        """Log the row's figures at its step."""
        figures: dict[str, Any] = dict(_figures(row))
        if "event" in row:
            figures["event"] = f"{row['event']}: {row['message']}"
        self._run.log(figures | {"step": row["step"]})

    def close(self) -> None:
        """Send the last rows."""
        self._run.finish()


def _not_started(error: Exception) -> ConfigError:
    return ConfigError(
        f"output.report_to: wandb cannot be started: {error}. Log in with `wandb login`, set WANDB_MODE=offline to "
        "keep the run on this disk, or leave wandb out"
    )


def _figures(row: Row) -> dict[str, float]:
    """The row's finite numbers, by their names in the trackers."""
    figures = {}
    for name, value in row.items():
        if name != "step" and isinstance(value, int | float) and math.isfinite(value):
            figures[f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}"] = float(value)
    return figures


def _import(tracker: str) -> Any:
    package = _NEEDS[tracker]
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(
            f"output.report_to: {tracker} needs the package {package}, which cannot be imported ({error}): "
            f"`pip install {package}`, or leave {tracker} out"
        ) from error
