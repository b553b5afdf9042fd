"""What a run reports: rows of numbers, and the sinks that take them.

A row is a flat mapping. A row of a train step has `step`, `loss`, `grad_norm`, `learning_rate`, `token_accuracy`,
`num_targets`, `tokens_per_second`, `seconds` (since the start) and `seconds_left`; a row of an evaluation has `step`,
`eval_loss`, `eval_perplexity`, `eval_token_accuracy` and `eval_num_targets`. A sink is anything with `write` and
`close`; the loop knows no more of it, so a tracker is one small class.
"""

import collections
import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TextIO

Row = Mapping[str, Any]


class Sink(Protocol):
    """Takes the rows of a run."""

    def write(self, row: Row) -> None:
        """Take one row."""
        ...

    def close(self) -> None:
        """Take no more rows."""
        ...


class Evaluation(NamedTuple):
    """The model on held-out rows, as means over all target tokens.

    Attributes:
        loss: nats a token.
        token_accuracy: part of the tokens that are the most probable one.
        num_targets: tokens counted.
    """

    loss: float
    token_accuracy: float
    num_targets: int

    def row(self, step: int) -> dict[str, Any]:
        """The row that is reported for it after `step` steps."""
        return {
            "step": step,
            "eval_loss": self.loss,
            "eval_perplexity": math.exp(min(self.loss, 700.0)),
            "eval_token_accuracy": self.token_accuracy,
            "eval_num_targets": self.num_targets,
        }


class JsonLines:
    """A file with one JSON object a row, complete up to the last row at any time.

    A number that is not finite is written as null, which JSON can hold.
    """

    def __init__(self, path: str | Path):
        """Start the file, over an earlier one.

        Args:
            path: the file; its folder exists.
        """
        self._file: TextIO = open(path, "w", encoding="utf-8")

    def write(self, row: Row) -> None:
        """Write one line, and hand it to the operating system."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Throughput:
    """Tokens a second and the time left, from the steps that ended last.

    The first step, which compiles, and what happens between `pause` and the next step's end do not count.
    """

    def __init__(self, total_steps: int, *, window: int = 20, clock: Callable[[], float] = time.perf_counter):
        """Start the clock.

        Args:
            total_steps: the number of steps of the run.
            window: how many steps the mean is over.
            clock: seconds from any zero.
        """
        self._total, self._clock = total_steps, clock
        self._recent: collections.deque[tuple[float, int]] = collections.deque(maxlen=window)
        self._start = clock()
        self._mark: float | None = None

    def pause(self) -> None:
        """Do not count the time until the next step ends."""
        self._mark = None

    def step(self, step: int, num_tokens: int) -> dict[str, float | None]:
        """A step has ended.

        Args:
            step: its number, from 1.
            num_tokens: the tokens it read, padding not counted.

        Returns:
            tokens_per_second and seconds_left (None while unknown) and seconds since the start.
        """
        now = self._clock()
        if self._mark is not None:
            self._recent.append((now - self._mark, num_tokens))
        self._mark = now
        seconds = sum(s for s, _ in self._recent)
        known = seconds > 0
        return {
            "tokens_per_second": sum(n for _, n in self._recent) / seconds if known else None,
            "seconds": now - self._start,
            "seconds_left": seconds / len(self._recent) * (self._total - step) if known else None,
        }
