"""Pages with charts: one self-contained file each, with plotly's JavaScript, that needs no network.

`charts.js` in the page hands the panels on to plotly. Colours stay names of `COLOURS`: the page has one of each for the
light and one for the dark ground.
"""

import base64
import functools
import gzip
import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from jaxtyping import Float64

from fastjax.training.report.facts import show_loss
from fastjax.training.report.panels import COLOURS, Panel, Series

MOST_POINTS = 4000
"""Points of a line; a longer one keeps the lowest and the highest point of every stretch."""

_FORMATS = {
    "number": {"hoverformat": ".5~g"},
    "count": {"hoverformat": ",.0f", "tickformat": ",~f"},
    "percent": {"hoverformat": ".4~p", "tickformat": ".3~p"},
    "powers": {"hoverformat": ".4~g", "exponentformat": "e"},
}


def render_page(template: str, panels: Sequence[Panel], extent: tuple[int, int], **values: Any) -> str:
    """Fill in a page.

    Args:
        template: name of the template, which extends frame.html.jinja.
        panels: the panels, in order.
        extent: the first step and the last, of all panels.
        values: of the template's names.

    Returns:
        The HTML.
    """
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    templates = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    templates.filters["loss"] = show_loss
    charts = [describe_chart(panel, extent) for panel in panels]
    library = _library() if charts else ""
    page = templates.get_template(template)
    return page.render(charts=charts, colours=COLOURS, library=library, **values)


@functools.cache
def _library() -> str:
    """The JavaScript of plotly in gzip and base64: 2 MB of 4.8."""
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()


def describe_chart(panel: Panel, extent: tuple[int, int]) -> dict[str, Any]:
    """A panel as JSON: its title, plotly's traces, and what is its own in plotly's layout.

    Args:
        panel: the panel.
        extent: as for `render_page`.
    """
    traces = [_trace(series, panel.title) for series in panel.series]
    layout: dict[str, Any] = {
        "xaxis": {"range": [extent[0], extent[1] * 1.01]},
        "yaxis": _FORMATS[panel.kind] | _axis(panel),
        "showlegend": any(series.legend and series.label for series in panel.series),
        "annotations": [
            {"x": step, "y": _place(panel, height), "text": text, "showarrow": False, "xanchor": "left", "xshift": 6}
            for step, height, text in panel.labels
        ],
    }
    if any(series.framed for series in panel.series):
        layout["yaxis2"] = {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True}
    return {"title": panel.title, "wide": panel.wide, "traces": traces, "layout": layout}


def thinned(
    x: Float64[np.ndarray, " N"], y: Float64[np.ndarray, " N"], most: int = MOST_POINTS
) -> tuple[Float64[np.ndarray, " M"], Float64[np.ndarray, " M"]]:
    """A line in fewer points, with its extremes: those of each of `most` / 2 stretches of it.

    Args:
        x: places.
        y: values; NaN: a gap, which stays if it fills a stretch.
        most: points of the result.
    """
    if len(x) <= most:
        return x, y
    known = np.isfinite(y)
    low, high = np.where(known, y, np.inf), np.where(known, y, -np.inf)
    stretches = np.array_split(np.arange(len(x)), most // 2)
    extremes = sorted({int(one[pick]) for one in stretches for pick in (low[one].argmin(), high[one].argmax())})
    return x[extremes], y[extremes]


def _trace(series: Series, title: str) -> dict[str, Any]:
    x, y = np.asarray(series.x, np.float64), np.asarray(series.y, np.float64)
    if series.width and not series.notes:
        x, y = thinned(x, y)
    name = _escape(series.label or title)
    trace: dict[str, Any] = {
        "x": _numbers(x),
        "y": _numbers(y),
        "name": name,
        "meta": series.colour,
        "mode": "+".join(["lines"] * bool(series.width) + ["markers"] * (series.symbol is not None)),
        "opacity": series.opacity,
        "showlegend": series.legend and bool(series.label),
        "line": {"width": series.width, "dash": "dash" if series.form == "dashed" else "solid"},
    }
    if series.form == "steps":
        trace["line"]["shape"] = "hv"
    if series.group:
        trace["legendgroup"] = _escape(series.group)
    if series.symbol is not None:
        trace["marker"] = {"symbol": series.symbol, "size": series.size * 4 / 3}  # points to pixels
        if series.symbol.endswith("-open"):
            trace["marker"]["line"] = {"width": 1.5}
    if series.framed:
        trace["yaxis"] = "y2"
    if series.notes:
        trace["text"] = [_escape(note) for note in series.notes]
        trace["hovertemplate"] = "%{text}<extra></extra>"
    return trace


def _axis(panel: Panel) -> dict[str, Any]:
    """Scale and limits of the axis."""
    low, high = panel.limits
    axis: dict[str, Any] = {}
    if panel.base is not None:
        axis["type"] = "log"
        if panel.base == 2:
            axis["dtick"] = math.log10(2)
    if low is not None and high is not None:
        axis["range"] = [_place(panel, low), _place(panel, high)]
    elif low == 0:
        axis["rangemode"] = "tozero"
    return axis


def _place(panel: Panel, height: float) -> float:
    """A height as plotly takes it on the panel's axis."""
    return float(math.log10(height) if panel.base is not None else height)


def _numbers(values: Float64[np.ndarray, " N"]) -> list[float | int | None]:
    """Six digits of each; None: not finite."""
    finite = (float(f"{value:.6g}") if abs(value) < 1e6 else float(value) for value in values)
    return [None if not math.isfinite(v) else int(v) if v.is_integer() else v for v in finite]


def _escape(text: str) -> str:
    """A text that plotly, which reads a few of HTML's tags, shows as it is."""
    return html.escape(text, quote=False)
