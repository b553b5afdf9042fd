"""The metrics of a run: rows of numbers, and their sinks.

A row is a flat mapping, of one of three kinds. All have `step`, the number of updates so far.

- Train step: `loss` (nats a target token), `grad_norm`, `learning_rate`, `token_accuracy`, `num_targets`, `num_tokens`,
  `epoch` (passes over the data), `tokens_per_second`, on several devices `tokens_per_second_per_device`,
  `model_flops_utilization`, `memory_bytes`, `seconds` (since the start) and `seconds_left`, None where unknown; with
  float16 `loss_scale`, `skipped_steps` (so far), and `skipped` (True) on a step that changed nothing; with label
  smoothing or z-loss `cross_entropy` alone and `z_loss` (mean square of the logits' logsumexp), where `loss` has all
  terms; of a mixture of experts `router_largest_share` (the busiest expert's share of the choices, mean over the
  layers), `router_entropy` (of the experts' shares, 1 where they are even) and `router_load_balancing_loss` (k where
  they are even); of preferences those of `training.preferences.losses`, and no tokens' accuracy and targets.
- Evaluation: `eval_loss`; of tokens `eval_perplexity`, `eval_token_accuracy`, `eval_num_targets`; and further `eval_`
  names of another loss, such as one of preferences, or of a custom evaluation.
- Event: `event` ("started", "compiled", "saved", "save_failed", "resumed", "early_stop", "profile", "interrupted",
  "finished" …) and a `message` for people. "started" has `load_seconds` of the model, `compile_seconds` of the train
  step (short where the program was kept), `overlap_seconds` of both at once, and `first_step_seconds` until the first
  step's numbers were there; "compiled" has `compile_seconds` of the step for batches of another `row_length`;
  "finished" has `files`, the SHA-256 of the result's weights, `base`, fingerprints of the base model, and of several
  devices `memory_bytes_by_device` (by process where there are several).

A sink is anything with `write` and `close`, so a tracker is one small class.
"""

import collections
import contextlib
import json
import math
import time
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TextIO

import jax
from rich.console import Console

from convert import strict_json
from convert.files import atomic_file
from fastjax.parallel.processes import gathered_numbers

Row = Mapping[str, Any]


class Sink(Protocol):
    """A receiver of a run's rows."""

    def write(self, row: Row) -> None:
        """Take one row."""
        ...

    def close(self) -> None:
        """Take no more rows."""
        ...


class Tolerant:
    """A sink whose failure, such as a lost network or a full disk, is one warning and does not end the run."""

    def __init__(self, sink: Sink, name: str, console: Console):
        """Wrap a sink.

        Args:
            sink: the one that may fail.
            name: its name in the warning.
            console: for the warning.
        """
        self._sink, self._name, self._console = sink, name, console
        self._failed = False

    def write(self, row: Row) -> None:
        """Hand a row on; the next one is tried again."""
        self._try(lambda: self._sink.write(row))

    def close(self) -> None:
        """Close the sink."""
        self._try(self._sink.close)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except (Exception, SystemExit) as error:  # any library error; rich raises SystemExit on a closed pipe
            if not self._failed:
                message = f"warning: {self._name} fails, the run goes on without it: {type(error).__name__}: {error}"
                with contextlib.suppress(OSError, SystemExit):  # the console may be what fails
                    self._console.print(message, style="yellow", highlight=False, markup=False, soft_wrap=True)
            self._failed = True


class Evaluation(NamedTuple):
    """The model on held-out rows, as means over all target tokens, or over what a loss counts in their place.

    Attributes:
        loss: nats a token.
        token_accuracy: share of the targets that are the likeliest token.
        num_targets: tokens counted; 0: the loss is not of tokens.
        extra: other measurements, by names that begin with `eval_`.
    """

    loss: float
    token_accuracy: float
    num_targets: int
    extra: Mapping[str, float] = types.MappingProxyType({})

    def row(self, step: int) -> dict[str, Any]:
        """Its reported row after `step` steps."""
        tokens = {
            "eval_perplexity": math.exp(min(self.loss, 700.0)),
            "eval_token_accuracy": self.token_accuracy,
            "eval_num_targets": self.num_targets,
        }
        return {"step": step, "eval_loss": self.loss, **(tokens if self.num_targets else {}), **self.extra}

    @classmethod
    def from_row(cls, row: Row) -> "Evaluation":
        """The evaluation of a row.

        Args:
            row: `row`'s, or one read back, with None for a number that was not finite.
        """
        known = ("eval_loss", "eval_perplexity", "eval_token_accuracy", "eval_num_targets")
        values = {
            name: float("nan") if value is None else value for name, value in row.items() if name.startswith("eval_")
        }
        extra = {name: value for name, value in values.items() if name not in known}
        counted = values.get("eval_token_accuracy", 0.0), int(row.get("eval_num_targets", 0))
        return cls(values["eval_loss"], *counted, extra)


class JsonLines:
    """A file with one JSON object a row, complete up to the last row at any time.

    Numbers that are not finite are written as null.
    """

    def __init__(self, path: str | Path, resume_step: int | None = None):
        """Start or continue the file.

        Args:
            path: the file; its folder exists.
            resume_step: the step to resume from: later rows and a torn line of a killed run are dropped. None: replace
                an earlier file.
        """
        path = Path(path)
        kept = [] if resume_step is None else [row for row in read_rows(path) if row["step"] <= resume_step]
        with atomic_file(path) as file:
            file.write("".join(map(_line, kept)).encode())
        self._file: TextIO = open(path, "a", encoding="utf-8")

    def write(self, row: Row) -> None:
        """Write and flush one line."""
        self._file.write(_line(row))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a file that `JsonLines` wrote.

    Args:
        path: the file.

    Returns:
        The rows in order, without torn lines; empty without a file.
    """
    return parse_rows(Path(path).read_bytes()) if Path(path).exists() else []


def parse_rows(data: bytes) -> list[dict[str, Any]]:
    """The rows in lines that `JsonLines` wrote.

    Args:
        data: the lines, of a whole file or of a part that begins and ends with one.

    Returns:
        The rows in order, without torn lines.
    """
    rows = []
    for line in data.splitlines():
        try:
            row = strict_json.parse(line.decode())
        except ValueError:  # torn in the middle of a character, or of the JSON
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def _line(row: Row) -> str:
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(finite, allow_nan=False) + "\n"


def peak_memory() -> int | None:
    """Peak bytes of arrays on any of this process's devices; None where they keep no count (a CPU)."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    return max((peak for peak in peaks if peak is not None), default=None)


def peak_memories(devices: int) -> list[int]:
    """Peak bytes of arrays on each device of a run; empty where they keep no count, or of one device.

    Of several processes there is one figure each, the largest of its devices; all of them must call this.

    Args:
        devices: of the run.
    """
    if devices == 1:
        return []
    if jax.process_count() > 1:
        peaks = gathered_numbers(peak_memory() or 0)
    else:
        peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in jax.devices()[:devices]]
    return peaks if any(peaks) else []


class Throughput:
    """Speed of a run over its last steps, and its progress.

    The first step, which compiles, and the time between `pause` and the next step's end do not count.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        steps_per_epoch: int | None = None,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        devices: int = 1,
        memory: Callable[[], int | None] = peak_memory,
        seconds_before: float = 0.0,
        window: int = 20,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Start the clock.

        Args:
            total_steps: the number of steps of the run.
            steps_per_epoch: steps of a pass over the data; None: unknown.
            flops_per_token: model FLOPs of a token (`flops.flops_per_token`); None: unknown.
            peak_flops: FLOP/s of all devices together at best (`peak_flops` times their number); None: unknown.
            devices: of the run; of several there is the speed of one too.
            memory: peak of the device memory in bytes, read once a step.
            seconds_before: seconds that a resumed run took before it was stopped.
            window: number of steps in the mean.
            clock: seconds from any zero.
        """
        self._total, self._steps_per_epoch, self._memory, self._clock = total_steps, steps_per_epoch, memory, clock
        self._utilization_per_speed = flops_per_token / peak_flops if flops_per_token and peak_flops else None
        self._devices = devices
        self._recent: collections.deque[tuple[float, int]] = collections.deque(maxlen=window)
        self._start = clock() - seconds_before
        self._mark: float | None = None

    def pause(self) -> None:
        """Do not count the time until the next step ends."""
        self._mark = None

    def step(self, step: int, num_tokens: int) -> dict[str, float | None]:
        """Record the end of a step.

        Args:
            step: its number, from 1.
            num_tokens: the tokens it read, padding not counted.

        Returns:
            num_tokens, epoch, tokens_per_second, model_flops_utilization, memory_bytes, seconds and seconds_left of a
            train row.
        """
        now = self._clock()
        if self._mark is not None:
            self._recent.append((now - self._mark, num_tokens))
        self._mark = now
        seconds = sum(s for s, _ in self._recent)
        speed = sum(n for _, n in self._recent) / seconds if seconds > 0 else None
        per_speed = self._utilization_per_speed
        each = {} if self._devices == 1 else {"tokens_per_second_per_device": speed and speed / self._devices}
        return {
            "num_tokens": num_tokens,
            "epoch": step / self._steps_per_epoch if self._steps_per_epoch else None,
            "tokens_per_second": speed,
            **each,
            "model_flops_utilization": None if speed is None or per_speed is None else speed * per_speed,
            "memory_bytes": self._memory(),
            "seconds": now - self._start,
            "seconds_left": None if speed is None else seconds / len(self._recent) * (self._total - step),
        }
