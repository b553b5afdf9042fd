"""The rows of a run as columns, for plots and figures, and the jumps of its loss.

A step is a spike when its loss is above the median of the steps before it by more than six times their spread. The
spread is the median absolute deviation times 1.4826 (the standard deviation of a normal distribution); even ten spikes
hardly move either. Its floor of 2% of the median excludes the ripples of a very even loss. Consecutive steps are one
spike, at its highest step.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64

COLUMNS = (
    "step",
    "loss",
    "grad_norm",
    "learning_rate",
    "token_accuracy",
    "num_tokens",
    "epoch",
    "tokens_per_second",
    "tokens_per_second_per_device",
    "model_flops_utilization",
    "memory_bytes",
    "seconds",
    "loss_scale",
    "skipped",
    "router_largest_share",
    "router_entropy",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
)
"""The figures of a train step in the report."""
WINDOW = 50
"""Steps before a step that its expected loss comes from."""
LEAST = 10
"""The least of them; earlier steps are never spikes."""
DEVIATIONS = 6.0
"""Spreads above the median at which a spike begins."""
LEAST_SPREAD = 0.02
"""The least spread, as a part of the median."""


class History(NamedTuple):
    """The reported rows of a run.

    Attributes:
        steps: column → float64 [number of steps], by step; NaN: missing or not finite.
        evaluations: rows of evaluations, by step.
        events: rows of events, in order.
    """

    steps: dict[str, Float64[np.ndarray, " N"]]
    evaluations: list[Mapping[str, Any]]
    events: list[Mapping[str, Any]]

    @classmethod
    def from_rows(cls, rows: Iterable[Mapping[str, Any]]) -> "History":
        """Sort rows by kind; of two rows of one step, as in a resumed run, the later counts.

        Args:
            rows: from `metrics.read_rows`.
        """
        steps, evaluations, events = {}, {}, []
        for row in rows:
            if "event" in row:
                events.append(row)
            elif "loss" in row:
                steps[row["step"]] = row
            else:
                evaluations[row["step"]] = row
        ordered = [steps[step] for step in sorted(steps)]
        columns = {name: np.array([_number(row.get(name)) for row in ordered], np.float64) for name in COLUMNS}
        return cls(columns, [evaluations[step] for step in sorted(evaluations)], events)

    def known(self, name: str) -> bool:
        """Whether any step has the figure."""
        return bool(np.isfinite(self.steps[name]).any())

    def column(self, name: str) -> tuple[Float64[np.ndarray, " N"], Float64[np.ndarray, " N"]]:
        """The steps, and their figures."""
        return self.steps["step"], self.steps[name]

    def evaluated(self, name: str) -> tuple[list[int], list[float]]:
        """The steps of the evaluations with a figure, and the figures."""
        points = [(row["step"], _number(row.get(name))) for row in self.evaluations]
        points = [(step, value) for step, value in points if np.isfinite(value)]
        return [step for step, _ in points], [value for _, value in points]

    @property
    def extent(self) -> tuple[int, int]:
        """The steps that plots span: from 0 to the last one, at least to 1."""
        steps = [*map(int, self.steps["step"]), *(row["step"] for row in self.evaluations)]
        return min([0, *steps]), max([1, *steps])

    @property
    def own_metrics(self) -> list[str]:
        """Names of the evaluation's own metrics."""
        known = ("eval_loss", "eval_perplexity", "eval_token_accuracy", "eval_num_targets")
        names = dict.fromkeys(name for row in self.evaluations for name in row if name.startswith("eval_"))
        return [name for name in names if name not in known and self.evaluated(name)[0]]

    @property
    def best(self) -> Mapping[str, Any] | None:
        """The evaluation with the lowest loss."""
        rows = [row for row in self.evaluations if np.isfinite(_number(row.get("eval_loss")))]
        return min(rows, key=lambda row: row["eval_loss"], default=None)

    @property
    def seconds(self) -> float:
        """Duration of the steps, over all parts of a resumed run, even if its clock restarted."""
        seconds = self.steps["seconds"][np.isfinite(self.steps["seconds"])]
        ends = np.append(seconds[:-1][np.diff(seconds) < 0], seconds[-1:])
        return float(ends.sum())


def smooth(values: Float64[np.ndarray, " N"], window: int) -> Float64[np.ndarray, " N"]:
    """The running median, over fewer places at the ends; robust to spikes.

    Args:
        values: a column.
        window: an odd number of places; the median is NaN if none is finite.
    """
    if not len(values):
        return values
    padded = np.pad(np.where(np.isfinite(values), values, np.nan), window // 2, constant_values=np.nan)
    windows = np.lib.stride_tricks.sliding_window_view(padded, window)
    smoothed = np.full(len(values), np.nan)
    known = np.isfinite(windows).any(axis=1)
    smoothed[known] = np.nanmedian(windows[known], axis=1)
    return smoothed


def smoothing_window(num_steps: int) -> int:
    """Steps to smooth over: a thirtieth of the run, an odd number from 5 to 101."""
    return min(max(5, num_steps // 30), 100) | 1


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")


def median(values: Sequence[float] | Float64[np.ndarray, " N"]) -> float | None:
    """The median of the finite values; None without any."""
    finite = np.asarray(values, np.float64)
    finite = finite[np.isfinite(finite)]
    return float(np.median(finite)) if finite.size else None


class Spike(NamedTuple):
    """A jump of the loss.

    Attributes:
        step: the step with the highest loss.
        loss: its loss, in nats.
        expected: the median loss of the steps before.
        steps: number of consecutive steps above the threshold.
    """

    step: int
    loss: float
    expected: float
    steps: int


def find_spikes(steps: Float64[np.ndarray, " N"], losses: Float64[np.ndarray, " N"]) -> list[Spike]:
    """The spikes of a run.

    Args:
        steps: numbers of the steps.
        losses: their losses; those that are not finite are ignored.

    Returns:
        The spikes, by step.
    """
    finite = np.isfinite(losses)
    steps, losses = steps[finite], losses[finite]
    spikes: list[Spike] = []
    last = -2
    for index in range(LEAST, len(losses)):
        before = losses[max(0, index - WINDOW) : index]
        expected = float(np.median(before))
        spread = max(1.4826 * float(np.median(np.abs(before - expected))), LEAST_SPREAD * abs(expected))
        loss = float(losses[index])
        if loss <= expected + DEVIATIONS * spread:
            continue
        if last == index - 1:
            former = spikes.pop()
            higher = (int(steps[index]), loss) if loss > former.loss else (former.step, former.loss)
            spikes.append(Spike(*higher, former.expected, former.steps + 1))
        else:
            spikes.append(Spike(int(steps[index]), loss, expected, 1))
        last = index
    return spikes
