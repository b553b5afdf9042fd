"""The panels of the report: each is the plot of one figure over the steps, which `charts` describes to plotly."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float64

from fastjax.training.report.history import History, Spike, smooth, smoothing_window

COLOURS = {
    "blue": ("#0072B2", "#4aa8e0"),
    "orange": ("#E69F00", "#f0b429"),
    "green": ("#009E73", "#2dc79c"),
    "pink": ("#CC79A7", "#e29ac4"),
    "red": ("#D55E00", "#ff8a3d"),
    "grey": ("#6b7280", "#9ca3af"),
}
"""Name → colour on white, colour on a dark ground: Okabe and Ito's, distinct under every colour vision.

Important marks differ in form too.
"""

Symbol = Literal["circle", "diamond", "star", "triangle-down", "x-thin-open", "line-ns-open"]


class Series(NamedTuple):
    """A line or marks of a panel.

    Attributes:
        label: its name, in the legend and at the pointer; "": the title's.
        colour: a name of `COLOURS`.
        x: steps.
        y: the figure; NaN: a gap.
        width: of the line, in pixels; 0: marks alone.
        symbol: of the marks, plotly's; None: the line alone.
        size: of the marks, in points, four thirds of a pixel.
        opacity: from 0 to 1.
        form: of the line.
        legend: whether the legend has it.
        group: of series that the legend hides and shows together.
        framed: y is a part of the panel's height, from 0 at its foot to 1.
        notes: what is said of each mark; empty: its value.
    """

    label: str
    colour: str
    x: Sequence[float] | Float64[np.ndarray, " N"]
    y: Sequence[float] | Float64[np.ndarray, " N"]
    width: float = 1.4
    symbol: Symbol | None = None
    size: float = 2.5
    opacity: float = 1.0
    form: Literal["solid", "dashed", "steps"] = "solid"
    legend: bool = True
    group: str = ""
    framed: bool = False
    notes: Sequence[str] = ()


class Panel(NamedTuple):
    """One plot.

    Attributes:
        title: its quantity, with the unit.
        series: what it shows.
        wide: full width.
        kind: of its numbers; "powers": small ones, with the power of ten of the highest.
        base: of the logarithm of its axis; None: linear.
        limits: of its axis; None: by the numbers.
        labels: (step, height, text) of what lies beyond the limits.
    """

    title: str
    series: Sequence[Series]
    wide: bool = False
    kind: Literal["number", "count", "percent", "powers"] = "number"
    base: int | None = None
    limits: tuple[float | None, float | None] = (None, None)
    labels: Sequence[tuple[float, float, str]] = ()


def panels(history: History, spikes: Sequence[Spike], max_grad_norm: float | None = None) -> list[Panel]:
    """The plots of the run's figures.

    Args:
        history: the run.
        spikes: its loss spikes.
        max_grad_norm: clipping norm of the gradients; None or 0: no clipping.
    """
    shown = [_loss(history, spikes)]
    if history.known("grad_norm"):
        shown.append(_grad_norm(history, max_grad_norm))
    if history.known("learning_rate"):
        series = [Series("", "green", *history.column("learning_rate"), width=1.8)]
        shown.append(Panel("Learning rate", series, kind="powers", limits=(0, None)))
    if history.known("token_accuracy"):
        series = [*smoothed(history, "token_accuracy", "blue", "training")]
        series += held_out(history, "eval_token_accuracy", "held out")
        shown.append(Panel("Token accuracy", series, kind="percent"))
    if history.known("tokens_per_second"):
        series = [Series("", "pink", *history.column("tokens_per_second"))]
        shown.append(Panel("Tokens a second", series, kind="count", limits=from_zero(series)))
    if history.known("model_flops_utilization"):
        series = [Series("", "orange", *history.column("model_flops_utilization"))]
        shown.append(Panel("Model FLOPs utilisation", series, kind="percent", limits=from_zero(series)))
    if history.known("memory_bytes"):
        steps, memory = history.column("memory_bytes")
        series = [Series("", "grey", steps, memory / 2**30, width=1.8, form="steps")]
        shown.append(Panel("Device memory, peak so far (GiB)", series, limits=from_zero(series)))
    if history.known("loss_scale"):
        shown.append(_loss_scale(history))
    if history.known("router_entropy"):
        series = [
            *smoothed(history, "router_entropy", "blue", "entropy"),
            *smoothed(history, "router_largest_share", "pink", "busiest"),
        ]
        title = "Choice of experts: entropy (1: even), share of the busiest"
        shown.append(Panel(title, series, kind="percent"))
    if history.known("rewards/chosen"):
        series = [
            *smoothed(history, "rewards/chosen", "green", "chosen"),
            *smoothed(history, "rewards/rejected", "red", "rejected"),
        ]
        shown.append(Panel("Rewards of answers", series))
    if history.known("rewards/accuracies"):
        series = [*smoothed(history, "rewards/accuracies", "blue", "training")]
        series += held_out(history, "eval_rewards/accuracies", "held out")
        shown.append(Panel("Pairs whose chosen answer has the larger reward", series, kind="percent"))
    for name in history.own_metrics:
        shown.append(Panel(f"Held out: {name.removeprefix('eval_')}", held_out(history, name, "")))
    return shown


def smoothed(history: History, name: str, colour: str, label: str, form: Any = "solid") -> list[Series]:
    """A figure of every step, pale, and its running median; a short run is its own summary.

    Args:
        history: the run.
        name: of the column.
        colour: a name of `COLOURS`.
        label: of the figure.
        form: of the median's line.
    """
    steps, values = history.column(name)
    window = smoothing_window(len(steps))
    if len(steps) < 3 * window:
        return [Series(label, colour, steps, values, symbol="circle", form=form)]
    pale = Series(label, colour, steps, values, width=0.8, opacity=0.4, legend=False, group=f"{name} {label}")
    median_line = pale._replace(y=smooth(values, window), width=1.8, opacity=1.0, form=form, legend=True)
    return [pale, median_line._replace(label=f"{label} (median of {window} steps)")]


def held_out(history: History, name: str, label: str, colour: str = "red", form: Any = "solid") -> list[Series]:
    """A figure of the evaluations; empty without any.

    Args:
        history: the run.
        name: of the figure.
        label: of the line; "": it needs none.
        colour: a name of `COLOURS`.
        form: of the line.
    """
    steps, values = history.evaluated(name)
    return [Series(label, colour, steps, values, symbol="diamond", size=4, form=form)] if steps else []


def from_zero(series: Sequence[Series]) -> tuple[float, float]:
    """Limits from zero to a little above the highest value."""
    values = np.concatenate([np.asarray(one.y, np.float64) for one in series])
    return 0.0, 1.15 * float(np.nanmax(values)) or 1.0


def _loss(history: History, spikes: Sequence[Spike]) -> Panel:
    steps, losses = history.column("loss")
    base, limits, inside = loss_axis([history])
    series = [*smoothed(history, "loss", "blue", "training"), *held_out(history, "eval_loss", "held out")]
    best = history.best
    if best is not None and len(history.evaluations) > 1:
        series.append(Series("best held out", "red", [best["step"]], [best["eval_loss"]], 0, "star", 12))
    if spikes:
        heights = [min(spike.loss, inside) for spike in spikes]
        notes = [f"spike: {spike.loss:.4g}, expected {spike.expected:.4g}" for spike in spikes]
        label = f"spike ({len(spikes):,})"
        series.append(Series(label, "pink", [s.step for s in spikes], heights, 0, "triangle-down", 6, notes=notes))
    lost = steps[~np.isfinite(losses)]
    if lost.size:
        notes = ["not finite"] * lost.size
        series.append(Series("not finite", "red", lost, np.full(lost.size, inside), 0, "x-thin-open", 6, notes=notes))
    labels = _beyond(spikes, inside, float(np.ptp(steps))) if spikes else []
    return Panel("Loss (nats)", [*series, *_events(history)], True, base=base, limits=limits, labels=labels)


def loss_axis(
    histories: Sequence[History],
) -> tuple[int | None, tuple[float | None, float | None], float]:
    """An axis that fits losses without their rare peaks, which are marked at its upper edge.

    A loss that falls to a thirtieth gets a logarithmic axis; its end would be flat otherwise.

    Args:
        histories: the runs that share it.

    Returns:
        The base of its logarithm (None: linear), its limits, and the height of those marks.
    """
    losses = [history.steps["loss"] for history in histories]
    finite = [loss[np.isfinite(loss)] for loss in losses]
    smooth_losses = [smooth(loss, smoothing_window(len(loss))) for loss in losses]
    evaluated = np.concatenate([history.evaluated("eval_loss")[1] for history in histories])
    common = np.concatenate([*(loss[np.isfinite(loss)] for loss in smooth_losses), evaluated])
    if not common.size:
        return None, (None, None), 1.0
    low = float(min([*(loss.min(initial=np.inf) for loss in finite), *evaluated]))
    high = float(max([common.max(), *(np.quantile(loss, 0.98) for loss in finite if loss.size)]))
    if low > 0 and common.max() > 30 * common.min():
        margin = (high / low) ** 0.06
        return 10, (low / margin, high * margin), high * margin**0.5
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return None, (max(low - margin, min(0.0, low)), high + margin), high + 0.5 * margin


def _beyond(spikes: Sequence[Spike], inside: float, extent: float) -> list[tuple[float, float, str]]:
    """Labels of spikes beyond the edge, with their height, where there is room."""
    labels: list[tuple[float, float, str]] = []
    for spike in sorted(spikes, key=lambda spike: -spike.loss):
        if spike.loss > inside and all(abs(spike.step - step) > 0.06 * extent for step, _, _ in labels):
            labels.append((spike.step, inside, f"{spike.loss:.3g}"))
    return labels


def _events(history: History) -> list[Series]:
    """Checkpoints as ticks at the foot, stops and resumptions as lines."""
    series = []
    saved = sorted({row["step"] for row in history.events if row["event"] == "saved"})
    if saved:
        notes = ["checkpoint"] * len(saved)
        heights = [0.02] * len(saved)
        series.append(Series("checkpoint", "grey", saved, heights, 0, "line-ns-open", 8, framed=True, notes=notes))
    stops = sorted({row["step"] for row in history.events if row["event"] in ("interrupted", "resumed")})
    if stops:
        x, y = np.repeat(stops, 3), [0.0, 1.0, np.nan] * len(stops)
        notes = ["stopped, resumed"] * len(x)
        series.append(Series("stopped, resumed", "grey", x, y, 1.1, form="dashed", framed=True, notes=notes))
    return series


def _grad_norm(history: History, max_grad_norm: float | None) -> Panel:
    series = smoothed(history, "grad_norm", "orange", "norm")
    steps, values = history.column("grad_norm")
    positive = values[np.isfinite(values) & (values > 0)]
    if max_grad_norm and positive.size and positive.max() > 0.5 * max_grad_norm:
        label = f"clipped above {max_grad_norm:g}"
        series.append(Series(label, "grey", [0, steps[-1]], [max_grad_norm] * 2, 1.1, form="dashed"))
    title = "Gradient norm, before clipping"
    if positive.size and positive.max() > 20 * positive.min():
        return Panel(title, series, base=10)
    return Panel(title, series, limits=(0, None))


def _loss_scale(history: History) -> Panel:
    steps, scales = history.column("loss_scale")
    series = [Series("", "blue", steps, scales, 1.6, form="steps")]
    skipped = history.steps["skipped"] == 1
    if skipped.any():
        label = f"skipped step ({int(skipped.sum()):,})"
        series.append(Series(label, "red", steps[skipped], scales[skipped], 0, "x-thin-open", 6))
    return Panel("Loss scale of float16", series, kind="count", base=2)
