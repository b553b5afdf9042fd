"""A run's rows for the live curves of the page, read from its metrics.jsonl as it grows."""

import hashlib
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.errors import shorten
from fastjax.errors import ConfigError
from fastjax.runs.folder import RunFolder
from fastjax.training.metrics import parse_rows

MOST_BYTES = 1 << 20
"""Bytes of the file in one answer."""
STEP_FIGURES = ("step", "loss", "learning_rate", "tokens_per_second", "seconds_left")


class RunCurves:
    """The rows of one run, from any place of its file on."""

    def __init__(self, folder: str | Path):
        """Take a run, whether at work, stopped or finished, or about to begin.

        Args:
            folder: its output folder.

        Raises:
            ConfigError: no such folder.
        """
        if not Path(folder).is_dir():
            raise ConfigError(
                f"run: expected the output folder of a run, as `output.output_dir` names it, got {folder}, which is "
                f"{'a file' if Path(folder).exists() else 'not there'}"
            )
        self._folder = RunFolder(Path(folder), Path(folder) / "adapter")

    def read(self, file: str, offset: int) -> dict[str, Any]:
        """The rows since an earlier answer.

        A run that is resumed, or started anew, replaces its file. Then, and where `offset` lies beyond the file, the
        answer begins at the first row.

        Args:
            file: `file` of the earlier answer, which tells one file from another; "": none.
            offset: `offset` of the earlier answer, in bytes; 0: none.

        Returns:
            `name` of the run; `file` and `offset`, for the next call; `restarted`, whether the answer begins at the
            first row; `more`, whether there are further rows already; `steps`, rows of `STEP_FIGURES`, null where
            unknown; `evaluations`, rows of `step` and `eval_loss`; `events`, rows of
            `step`, `event` and `message`; `last`, the last row's event, "" where it is none, null without a row; `age`,
            the seconds since the file was written.

        Raises:
            OSError: the file cannot be read.
        """
        try:
            with open(self._folder.metrics, "rb") as stream:
                status = os.fstat(stream.fileno())
                known = _identity(status.st_ino, stream.readline(MOST_BYTES))
                start = offset if file == known and offset <= status.st_size else 0
                stream.seek(start)
                data = stream.read(MOST_BYTES)
        except FileNotFoundError:
            status, known, start, data = None, "", 0, b""
        whole = data[: data.rfind(b"\n") + 1]  # the last line may still be written
        if not whole and len(data) == MOST_BYTES:  # no row is as long: it is passed over
            whole = data
        end = start + len(whole)
        return {
            "name": self._name(),
            "file": known,
            "offset": end,
            "restarted": start == 0,
            "more": status is not None and end < status.st_size and bool(whole),
            "age": None if status is None else max(0.0, time.time() - status.st_mtime),
            **_sorted_rows(whole),
        }

    def _name(self) -> str:
        settings = self._folder.read_settings() or {}
        output = settings.get("output")
        given = output.get("run_name") if isinstance(output, dict) else None
        return str(given or self._folder.path.resolve().name)


def _identity(inode: int, first: bytes) -> str:
    """A name of the file: another once it is replaced, even by one with its number; "" before its first row."""
    return f"{inode:x}-{hashlib.sha256(first).hexdigest()[:16]}" if first.endswith(b"\n") else ""


def _sorted_rows(data: bytes) -> dict[str, Any]:
    """Rows by kind, with what is shown of each."""
    steps, evaluations, events, last = [], [], [], None
    for row in parse_rows(data):
        last = str(row.get("event", ""))
        if "event" in row:
            told = {name: shorten(str(row.get(name) or ""), 500) for name in ("event", "message")}
            events.append({"step": row["step"], **told})
        elif "loss" in row:
            steps.append(_numbers(row, STEP_FIGURES))
        elif "eval_loss" in row:
            evaluations.append(_numbers(row, ("step", "eval_loss")))
    return {"steps": steps, "evaluations": evaluations, "events": events, "last": last}


def _numbers(row: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, float | None]:
    """Finite numbers, and None in the place of all else, which JSON does not have."""
    values = {name: row.get(name) for name in names}
    known = {name: isinstance(value, int | float) and math.isfinite(value) for name, value in values.items()}
    return {name: value if known[name] else None for name, value in values.items()}
