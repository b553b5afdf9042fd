"""The panels of the report: each draws one figure of the run over its steps.

The colours are Okabe and Ito's, distinct under every colour vision; important marks differ in form too. matplotlib
without pyplot leaves a user's own figures and backend alone.
"""

import io
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float64
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from fastjax.training.report.history import History, median, smooth, smoothing_window
from fastjax.training.report.spikes import Spike

BLUE, ORANGE, GREEN, PINK, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#6b7280"

STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9ca3af",
    "axes.labelcolor": "#374151",
    "axes.grid": True,
    "grid.color": "#e5e7eb",
    "grid.linewidth": 0.7,
    "xtick.color": "#374151",
    "ytick.color": "#374151",
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "path",
}
"""Of every figure of the report."""

_RASTER = 3000
"""Points from which on a line is stored as pixels, also in an SVG, which would be many megabytes."""


class Panel(NamedTuple):
    """One plot.

    Attributes:
        title: its quantity, with the unit.
        draw: draws it.
        wide: full width, with the legend beside the title.
        legend: the corner of the legend otherwise.
    """

    title: str
    draw: Callable[[Axes], None]
    wide: bool = False
    legend: Literal["upper right", "lower right"] = "upper right"


def panels(history: History, spikes: Sequence[Spike], max_grad_norm: float | None = None) -> list[Panel]:
    """The plots of the run's figures.

    Args:
        history: the run.
        spikes: its loss spikes.
        max_grad_norm: clipping norm of the gradients; None or 0: no clipping.
    """
    found = [Panel("Loss (nats)", lambda axis: _loss(axis, history, spikes), wide=True)]
    if history.known("grad_norm"):
        found.append(Panel("Gradient norm, before clipping", lambda axis: _grad_norm(axis, history, max_grad_norm)))
    if history.known("learning_rate"):
        found.append(Panel("Learning rate", lambda axis: _learning_rate(axis, history)))
    if history.known("token_accuracy"):
        found.append(Panel("Token accuracy", lambda axis: _accuracy(axis, history), legend="lower right"))
    if history.known("tokens_per_second"):
        utilization = history.known("model_flops_utilization")
        title = "Tokens a second" + " · model FLOPs utilisation (right)" * utilization
        found.append(Panel(title, lambda axis: _throughput(axis, history)))
    if history.known("memory_bytes"):
        found.append(Panel("Device memory, peak so far (GiB)", lambda axis: _memory(axis, history)))
    if history.known("loss_scale"):
        found.append(Panel("Loss scale of float16", lambda axis: _loss_scale(axis, history)))
    if history.known("router_entropy"):
        title = "Choice of experts: entropy (1: even), share of the busiest"
        found.append(Panel(title, lambda axis: _routers(axis, history)))
    for name in history.own_metrics:
        title = f"Held out: {name.removeprefix('eval_')}"
        found.append(Panel(title, lambda axis, name=name: _held_out(axis, history, name, "")))
    return found


def draw_panel(panel: Panel, axis: Axes, history: History) -> None:
    """Draw a panel with the shared parts: title, steps, marks of interruptions.

    Args:
        panel: the panel.
        axis: its axes.
        history: the run.
    """
    panel.draw(axis)
    axis.set_title(panel.title)
    axis.set_xlabel("step")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8 if panel.wide else 6))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    steps = [*history.steps["step"], *(row["step"] for row in history.evaluations)]
    if steps:
        axis.set_xlim(min(0, *steps), max(*steps, 1) * 1.01)
    labels = axis.get_legend_handles_labels()[1]
    if labels and panel.wide:
        axis.legend(
            loc="lower right", bbox_to_anchor=(1.005, 0.985), ncols=len(labels), columnspacing=1.1, handletextpad=0.4
        )
    elif labels:
        axis.legend(loc=panel.legend)


def svg(panel: Panel, history: History) -> str:
    """A panel as an SVG image.

    Args:
        panel: the panel.
        history: the run.
    """
    with rc_context(STYLE):
        # Fixed margins align the axes of stacked panels.
        size, left = ((10.4, 3.6), 0.06) if panel.wide else ((5.1, 2.6), 0.1255)
        figure = Figure(figsize=size, dpi=200)
        figure.subplots_adjust(
            left=left, right=0.985 if panel.wide else 0.9, top=1 - 0.3 / size[1], bottom=0.45 / size[1]
        )
        draw_panel(panel, figure.subplots(), history)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def _line(axis: Axes, history: History, name: str, colour: str, label: str, scale: float = 1.0) -> None:
    """A figure of every step, pale, and its running median."""
    steps, values = history.steps["step"], history.steps[name] * scale
    window = smoothing_window(len(steps))
    if len(steps) < 3 * window:  # a short run is its own summary
        axis.plot(steps, values, color=colour, linewidth=1.4, marker="o", markersize=2.5, label=label)
        return
    axis.plot(steps, values, color=colour, alpha=0.3, linewidth=0.8, rasterized=len(steps) > _RASTER)
    axis.plot(steps, smooth(values, window), color=colour, linewidth=1.8, label=f"{label} (median of {window} steps)")


def _held_out(axis: Axes, history: History, name: str, label: str) -> None:
    steps, values = history.evaluated(name)
    if steps:
        axis.plot(steps, values, color=RED, linewidth=1.4, marker="D", markersize=4, label=label or None)


def _loss(axis: Axes, history: History, spikes: Sequence[Spike]) -> None:
    steps, losses = history.steps["step"], history.steps["loss"]
    _line(axis, history, "loss", BLUE, "training")
    _held_out(axis, history, "eval_loss", "held out")
    best = history.best
    if best is not None and len(history.evaluations) > 1:
        axis.plot(best["step"], best["eval_loss"], "*", color=RED, markersize=12, label="best held out")
    inside = _loss_axis(axis, losses, history.evaluated("eval_loss")[1])
    if spikes:
        heights = [min(spike.loss, inside) for spike in spikes]
        label = f"spike ({len(spikes):,})"
        axis.plot([s.step for s in spikes], heights, "v", color="black", markersize=6, mfc=PINK, label=label)
        _spike_labels(axis, spikes, inside, float(np.ptp(steps)))
    lost = steps[~np.isfinite(losses)]
    if lost.size:
        axis.plot(lost, np.full(lost.size, inside), "x", color=RED, markersize=6, label="not finite")
    _events(axis, history)


def _spike_labels(axis: Axes, spikes: Sequence[Spike], inside: float, extent: float) -> None:
    """Label spikes beyond the edge with their height, where there is room."""
    labelled: list[int] = []
    for spike in sorted(spikes, key=lambda spike: -spike.loss):
        if spike.loss > inside and all(abs(spike.step - step) > 0.06 * extent for step in labelled):
            text = f"{spike.loss:.3g}"
            axis.annotate(text, (spike.step, inside), (6, 0), textcoords="offset points", va="center", fontsize=8)
            labelled.append(spike.step)


def _events(axis: Axes, history: History) -> None:
    """Checkpoints as ticks at the foot, stops and resumptions as lines."""
    saved = sorted({row["step"] for row in history.events if row["event"] == "saved"})
    if saved:
        foot = axis.get_xaxis_transform()
        axis.plot(saved, [0.02] * len(saved), "|", color=GREY, markersize=8, transform=foot, label="checkpoint")
    stops = sorted({row["step"] for row in history.events if row["event"] in ("interrupted", "resumed")})
    for number, step in enumerate(stops):
        label = "stopped, resumed" if number == 0 else None
        axis.axvline(step, color=GREY, linestyle="--", linewidth=1.1, label=label)


def _loss_axis(axis: Axes, losses: Float64[np.ndarray, " N"], held_out: Sequence[float]) -> float:
    """Fit the axis to the loss without its rare peaks, marked at the upper edge; returns that edge.

    A loss that falls to a thirtieth gets a logarithmic axis; its end would be flat otherwise.
    """
    finite = losses[np.isfinite(losses)]
    smoothed = smooth(losses, smoothing_window(len(losses)))
    common = np.concatenate([smoothed[np.isfinite(smoothed)], held_out])
    if not common.size:
        return 1.0
    low, high = min(finite.min(initial=np.inf), *held_out, np.inf), common.max()
    if finite.size:
        high = max(high, np.quantile(finite, 0.98))
    if low > 0 and common.max() > 30 * common.min():
        axis.set_yscale("log")
        margin = (high / low) ** 0.06
        axis.set_ylim(low / margin, high * margin)
        return float(high * margin**0.5)
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    axis.set_ylim(max(low - margin, min(0.0, low)), high + margin)
    return float(high + 0.5 * margin)


def _grad_norm(axis: Axes, history: History, max_grad_norm: float | None) -> None:
    _line(axis, history, "grad_norm", ORANGE, "norm")
    values = history.steps["grad_norm"]
    positive = values[np.isfinite(values) & (values > 0)]
    if positive.size and positive.max() > 20 * positive.min():
        axis.set_yscale("log")
    else:
        axis.set_ylim(bottom=0)
    if max_grad_norm and positive.size and positive.max() > 0.5 * max_grad_norm:
        axis.axhline(max_grad_norm, color=GREY, linestyle="--", linewidth=1.1, label=f"clipped above {max_grad_norm:g}")


def _learning_rate(axis: Axes, history: History) -> None:
    axis.plot(history.steps["step"], history.steps["learning_rate"], color=GREEN, linewidth=1.8)
    axis.set_ylim(bottom=0)
    highest = float(np.nanmax(history.steps["learning_rate"]))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _in_powers(value, highest)))


def _accuracy(axis: Axes, history: History) -> None:
    _line(axis, history, "token_accuracy", BLUE, "training")
    _held_out(axis, history, "eval_token_accuracy", "held out")
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))


def _throughput(axis: Axes, history: History) -> None:
    speeds = history.steps["tokens_per_second"]
    axis.plot(history.steps["step"], speeds, color=PINK, linewidth=1.4, rasterized=len(speeds) > _RASTER)
    _from_zero(axis, speeds)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    # Utilisation is the speed times a constant: one line with two scales.
    per_speed = median(history.steps["model_flops_utilization"] / speeds)
    if per_speed:
        second = axis.secondary_yaxis(
            "right", functions=(lambda v: np.asarray(v) * per_speed, lambda v: np.asarray(v) / per_speed)
        )
        second.yaxis.set_major_formatter(PercentFormatter(1.0))
        second.spines["right"].set_visible(False)


def _memory(axis: Axes, history: History) -> None:
    values = history.steps["memory_bytes"] / 2**30
    axis.plot(history.steps["step"], values, color=GREY, linewidth=1.8, drawstyle="steps-post")
    _from_zero(axis, values)


def _routers(axis: Axes, history: History) -> None:
    _line(axis, history, "router_entropy", BLUE, "entropy")
    _line(axis, history, "router_largest_share", PINK, "busiest")
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))


def _loss_scale(axis: Axes, history: History) -> None:
    steps, scales = history.steps["step"], history.steps["loss_scale"]
    axis.plot(steps, scales, color=BLUE, linewidth=1.6, drawstyle="steps-post")
    axis.set_yscale("log", base=2)
    skipped = history.steps["skipped"] == 1
    if skipped.any():
        label = f"skipped step ({int(skipped.sum()):,})"
        axis.plot(steps[skipped], scales[skipped], "x", color=RED, markersize=6, label=label)


def _from_zero(axis: Axes, values: Float64[np.ndarray, " N"]) -> None:
    axis.set_ylim(0, 1.15 * float(np.nanmax(values)) or 1.0)


def _in_powers(value: float, highest: float) -> str:
    """A number with the power of ten of the highest of its axis: 0.5e-4, 1e-4, 1.5e-4."""
    if value == 0 or highest <= 0:
        return f"{value:g}"
    power = math.floor(math.log10(highest))
    return f"{value / 10.0**power:.3g}e{power}"
