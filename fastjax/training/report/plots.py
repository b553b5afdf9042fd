"""The panels of the report drawn by matplotlib, without pyplot, which leaves a user's own figures and backend alone."""

import math
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from fastjax.training.report.history import History
from fastjax.training.report.panels import COLOURS, Panel, Series

BLUE, ORANGE, GREEN, PINK, RED, GREY = (COLOURS[name][0] for name in ("blue", "orange", "green", "pink", "red", "grey"))
"""Colours on white."""

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
}
"""Of every figure of the report."""

_MARKERS = {"circle": "o", "diamond": "D", "star": "*", "spike": "v", "cross": "x", "tick": "|"}


def draw_panel(panel: Panel, axis: Axes, history: History) -> None:
    """Draw a panel.

    Args:
        panel: the panel.
        axis: its axes.
        history: the run.
    """
    for series in panel.series:
        _draw(series, axis)
    if panel.base is not None:
        axis.set_yscale("log", base=panel.base)
    axis.set_ylim(*panel.limits)
    for step, height, text in panel.labels:
        axis.annotate(text, (step, height), (6, 0), textcoords="offset points", va="center", fontsize=8)
    _numbers(panel, axis)
    axis.set_title(panel.title)
    axis.set_xlabel("step")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8 if panel.wide else 6))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    first, last = history.extent
    axis.set_xlim(first, last * 1.01)
    labels = axis.get_legend_handles_labels()[1]
    if labels and panel.wide:
        axis.legend(
            loc="lower right", bbox_to_anchor=(1.005, 0.985), ncols=len(labels), columnspacing=1.1, handletextpad=0.4
        )
    elif labels:
        axis.legend(loc=panel.legend)


def _draw(series: Series, axis: Axes) -> None:
    colour = COLOURS[series.colour][0]
    more: dict[str, Any] = {"color": colour}
    if series.symbol == "spike":
        more = {"color": "black", "markerfacecolor": colour}
    if series.framed:
        more["transform"] = axis.get_xaxis_transform()
    axis.plot(
        series.x,
        series.y,
        linewidth=series.width,
        linestyle="none" if not series.width else "--" if series.form == "dashed" else "-",
        drawstyle="steps-post" if series.form == "steps" else "default",
        marker="" if series.symbol is None else _MARKERS[series.symbol],
        markersize=series.size,
        alpha=series.opacity,
        label=series.label if series.legend and series.label else None,
        **more,
    )


def _numbers(panel: Panel, axis: Axes) -> None:
    """Format the numbers of the axis, and add the second one."""
    if panel.kind == "percent":
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    elif panel.kind == "count" and panel.base is None:
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    elif panel.kind == "powers":
        highest = float(np.nanmax(panel.series[0].y))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _in_powers(value, highest)))
    if panel.per_unit:
        factor = panel.per_unit
        second = axis.secondary_yaxis(
            "right", functions=(lambda v: np.asarray(v) * factor, lambda v: np.asarray(v) / factor)
        )
        second.yaxis.set_major_formatter(PercentFormatter(1.0))
        second.spines["right"].set_visible(False)


def _in_powers(value: float, highest: float) -> str:
    """A number with the power of ten of the highest of its axis: 0.5e-4, 1e-4, 1.5e-4."""
    if value == 0 or highest <= 0:
        return f"{value:g}"
    power = math.floor(math.log10(highest))
    return f"{value / 10.0**power:.3g}e{power}"
