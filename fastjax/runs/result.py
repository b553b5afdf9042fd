"""The result of a run: whether it is finished, whole, and the one that these settings would give."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.checkpoint import WEIGHT_FILES
from fastjax import strict_yaml
from fastjax.errors import ConfigError
from fastjax.runs.folder import RunFolder, settings_text
from fastjax.runs.settings_changes import listed, result_changes
from fastjax.training.config import TrainConfig
from fastjax.training.metrics import Evaluation, read_rows


def finished(folder: RunFolder, config: TrainConfig) -> bool:
    """Whether the run in a folder is over, and these settings would give the same result.

    Args:
        folder: of the run.
        config: the settings to resume with.
    """
    rows = read_rows(folder.metrics) if folder.result.is_dir() else []
    return bool(rows) and rows[-1].get("event") == "finished" and _changes(folder, config) == {}


def last_evaluation(folder: RunFolder) -> Evaluation | None:
    """The last held-out evaluation in the metrics; None: there is none.

    Args:
        folder: of the run.
    """
    evaluations = [row for row in read_rows(folder.metrics) if "eval_loss" in row]
    return Evaluation.from_row(evaluations[-1]) if evaluations else None


def weight_digests(result: Path) -> dict[str, str]:
    """SHA-256 of the files with weights in a result, by name.

    Args:
        result: a PEFT or model folder.
    """
    patterns = ("adapter_model.safetensors", *WEIGHT_FILES)
    digests = {}
    for file in sorted(file for pattern in patterns for file in result.glob(pattern)):
        with open(file, "rb") as stream:
            digests[file.name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return digests


def damage(folder: RunFolder) -> str | None:
    """Damage to the weights that a finished run has written; None: none, as far as is known.

    Args:
        folder: of the run.
    """
    written, current = read_rows(folder.metrics)[-1].get("files") or {}, weight_digests(folder.result)
    for name, digest in written.items():
        if current.get(name) != digest:
            return f"{name} is not as it was written" if name in current else f"{name} is missing"
    return None


def check_result(folder: RunFolder, config: TrainConfig) -> None:
    """Refuse to begin again, without a checkpoint to resume from, where an earlier result would be replaced.

    Args:
        folder: of the run.
        config: its settings.

    Raises:
        ConfigError: there is a result and `overwrite_output_dir` is not set; the settings that differ are named.
    """
    if not folder.result.exists() or config.output.overwrite_output_dir:
        return
    advice = "name another folder, or replace the result (output.overwrite_output_dir: true)"
    if changed := _changes(folder, config):
        raise ConfigError(
            f"--resume: expected the settings of {folder.result}, which is finished and has no checkpoint to go on "
            f"from with others: {listed(changed)}. Go back to them, {advice}"
        )
    raise ConfigError(
        f"--resume: expected a checkpoint in {folder.checkpoints}, got none beside {folder.result}; {advice}"
    )


def _changes(folder: RunFolder, config: TrainConfig) -> Mapping[str, tuple[Any, Any]] | None:
    """Differences from the settings in a folder that change the result; None: the folder has no settings."""
    old = folder.read_settings()
    return None if old is None else result_changes(old, strict_yaml.parse(settings_text(config)))
