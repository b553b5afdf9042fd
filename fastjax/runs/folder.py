"""The output folder of a run: its files, and its lock, which one run holds at a time."""

import contextlib
import dataclasses
import fcntl
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from convert.files import atomic_file, remove_unfinished
from fastjax import strict_yaml
from fastjax.errors import ConfigError
from fastjax.strict_yaml import YamlError
from fastjax.training.config import TrainConfig

#: The files of a run; others in its folder are left alone.
RUN_FILES = (
    "config.yaml",
    "metrics.jsonl",
    "checkpoints",
    "adapter",
    "model",
    "report.html",
    "report.png",  # of earlier versions
    "tensorboard",
    "profile",
)


class RunFolder(NamedTuple):
    """The output folder.

    Attributes:
        path: of the folder.
        result: `adapter`, or `model` after full fine-tuning.
    """

    path: Path
    result: Path

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """The file of the metrics."""
        return self.path / "metrics.jsonl"

    @property
    def profile(self) -> Path:
        """The folder of the profiler's traces."""
        return self.path / "profile"

    @property
    def settings(self) -> Path:
        """The file of the settings."""
        return self.path / "config.yaml"

    def write_settings(self, config: TrainConfig) -> None:
        """Write the settings, for `fastjax train --config`.

        Args:
            config: the settings.
        """
        with atomic_file(self.settings) as file:
            file.write(settings_text(config).encode())

    def read_settings(self) -> dict[str, Any] | None:
        """The settings of the run in the folder, by section; None: missing or torn."""
        try:
            settings = strict_yaml.parse(self.settings.read_text(encoding="utf-8"))
        except (FileNotFoundError, UnicodeDecodeError, YamlError):
            return None
        return settings if isinstance(settings, dict) else None

    def clear(self) -> None:
        """Remove the files of an earlier run but its result, which the new one replaces when it is whole."""
        for name in RUN_FILES:
            path = self.path / name
            if path != self.result:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def run_folder(config: TrainConfig) -> RunFolder:
    """The output folder of a run.

    Args:
        config: its settings.
    """
    output = Path(config.output.output_dir)
    return RunFolder(output, output / ("model" if config.model.full_finetuning else "adapter"))


def settings_text(config: TrainConfig) -> str:
    """The settings as YAML, all of them.

    Args:
        config: the settings.
    """
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, allow_unicode=True)


@contextlib.contextmanager
def claimed(config: TrainConfig, *, resume: bool) -> Iterator[RunFolder]:
    """The run's folder, made if need be, and locked until the block or the process ends.

    Temporaries of a killed run are removed; those of its checkpoints by `Checkpoints`.

    Args:
        config: the settings.
        resume: whether an earlier run there is resumed.

    Raises:
        ConfigError: another run is at work in the folder, or its results are there and neither `resume` nor
            overwrite_output_dir is set.
        OSError: the folder cannot be made.
    """
    folder = run_folder(config)
    output = folder.path
    earlier = [name for name in RUN_FILES if (output / name).exists()]
    if earlier and not resume and not config.output.overwrite_output_dir:
        raise ConfigError(
            f"output.output_dir: expected a folder without an earlier run, got {output}, which holds "
            f"{', '.join(earlier)}; go on with that run (--resume, or output.resume: true), name another folder, or "
            "replace it (output.overwrite_output_dir: true)"
        )
    output.mkdir(parents=True, exist_ok=True)
    with open(output / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"output.output_dir: expected a folder that no run is at work in, got {output}, which one is"
            ) from error
        for place in (output, folder.result):
            remove_unfinished(place)
        yield folder
