"""Runs read back from their folders, for a comparison."""

from collections.abc import Sequence
from pathlib import Path

from fastjax.errors import ConfigError
from fastjax.runs.folder import RunFolder
from fastjax.training.metrics import read_rows
from fastjax.training.report.comparison import ComparedRun
from fastjax.training.report.history import History


def read_runs(folders: Sequence[str]) -> list[ComparedRun]:
    """Read runs, whether at work, stopped or finished.

    A run is called by its `output.run_name` or its folder's name, or by its path where another run has that name.

    Args:
        folders: output folders.

    Raises:
        ConfigError: a folder is given twice, is no run's, or its run has no step yet.
        OSError: a file cannot be read.
    """
    seen: dict[Path, str] = {}
    for folder in folders:
        place = Path(folder).resolve()
        if place in seen:
            raise ConfigError(f"{folder}: expected every run once, got the folder {seen[place]} again")
        seen[place] = folder
    runs = [_read(folder) for folder in folders]
    names = [run.name for run in runs]
    return [run._replace(name=run.folder) if names.count(run.name) > 1 else run for run in runs]


def _read(folder: str) -> ComparedRun:
    place = RunFolder(Path(folder), Path(folder) / "adapter")
    if not place.metrics.is_file():
        found = "one without" if place.path.is_dir() else "a file" if place.path.exists() else "no such folder"
        raise ConfigError(f"{folder}: expected a run's output folder, with {place.metrics.name}, got {found}")
    history = History.from_rows(read_rows(place.metrics))
    if not len(history.steps["step"]):
        raise ConfigError(f"{place.metrics}: expected a run with at least one train step, got none")
    settings = {name: keys for name, keys in (place.read_settings() or {}).items() if isinstance(keys, dict)}
    name = settings.get("output", {}).get("run_name") or place.path.resolve().name
    return ComparedRun(str(name), folder, settings, history)
