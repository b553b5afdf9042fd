"""Several runs in one page: their figures side by side, what they were set to, and their curves overlaid."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fastjax.training.report.charts import render_page
from fastjax.training.report.facts import Fact, headline
from fastjax.training.report.history import History
from fastjax.training.report.panels import COLOURS, Panel, Series, from_zero, held_out, loss_axis, smoothed
from fastjax.training.report.settings import list_settings

_HUES = [name for name in COLOURS if name != "grey"]
_OWN_NAMES = ("output.output_dir", "output.run_name")
"""Settings that name a run; the page says them above."""


class ComparedRun(NamedTuple):
    """A run to compare.

    Attributes:
        name: unique among the runs.
        folder: its output folder.
        settings: section → key → value; empty: unknown.
        history: its rows, with at least one step.
    """

    name: str
    folder: str
    settings: Mapping[str, Mapping[str, Any]]
    history: History


def comparison_page(runs: Sequence[ComparedRun]) -> str:
    """The page of several runs.

    Args:
        runs: the runs, in order.

    Returns:
        The HTML, whole in itself.
    """
    firsts, lasts = zip(*(run.history.extent for run in runs), strict=True)
    extent = min(firsts), max(lasts)
    looks = [{"colour": colour, "dashed": form == "dashed"} for colour, form in map(_look, range(len(runs)))]
    return render_page(
        "comparison.html.jinja",
        overlaid(runs),
        extent,
        runs=[look | run._asdict() for look, run in zip(looks, runs, strict=True)],
        figures=figures(runs),
        differences=differing_settings(runs),
    )


def figures(runs: Sequence[ComparedRun]) -> dict[str, list[Fact | None]]:
    """The figures at the top of a report, of each run: label → facts; None: the run has none of it."""
    by_label = [{fact.label: fact for fact in headline(run.history)} for run in runs]
    labels = dict.fromkeys(label for facts in by_label for label in facts)
    return {label: [facts.get(label) for facts in by_label] for label in labels}


def differing_settings(runs: Sequence[ComparedRun]) -> dict[str, list[str | None]]:
    """The settings in which the runs differ, but for their folders and names: section.key → values, None: unknown.

    Args:
        runs: the runs; one of unknown settings differs from none.
    """
    known = [{setting.name: setting.value for setting in list_settings(run.settings, {})} for run in runs]
    names = [name for name in dict.fromkeys(name for values in known for name in values) if name not in _OWN_NAMES]
    settings = {name: [values.get(name) for values in known] for name in names}
    compared = [index for index, values in enumerate(known) if values]
    return {name: values for name, values in settings.items() if len({values[index] for index in compared}) > 1}


def overlaid(runs: Sequence[ComparedRun]) -> list[Panel]:
    """The plots of the runs, a line each.

    Args:
        runs: the runs.
    """
    base, limits, _ = loss_axis([run.history for run in runs])
    loss = _steps(runs, "loss")
    evaluated = _held_out(runs, "eval_loss")
    panels = [Panel("Training loss (nats)", loss, wide=True, base=base, limits=limits)]
    panels.append(Panel("Held-out loss (nats)", evaluated, wide=True, base=base))
    panels.append(Panel("Learning rate", _steps(runs, "learning_rate", whole=True), kind="powers", limits=(0, None)))
    panels.append(Panel("Gradient norm, before clipping", _steps(runs, "grad_norm"), base=10))
    panels.append(Panel("Token accuracy", _steps(runs, "token_accuracy"), kind="percent"))
    panels.append(Panel("Held-out token accuracy", _held_out(runs, "eval_token_accuracy"), kind="percent"))
    panels.append(_upwards("Tokens a second", _steps(runs, "tokens_per_second", whole=True), "count"))
    panels.append(_upwards("Model FLOPs utilisation", _steps(runs, "model_flops_utilization", whole=True), "percent"))
    memory = [
        line._replace(y=np.asarray(line.y) / 2**30, form="dashed" if line.form == "dashed" else "steps")
        for line in _steps(runs, "memory_bytes", whole=True)
    ]
    panels.append(_upwards("Device memory, peak so far (GiB)", memory, "number"))
    metrics = dict.fromkeys(name for run in runs for name in run.history.own_metrics)
    panels += [Panel(f"Held out: {name.removeprefix('eval_')}", _held_out(runs, name)) for name in metrics]
    return [panel if panel.wide else _without_legend(panel) for panel in panels if panel.series]


def _steps(runs: Sequence[ComparedRun], name: str, *, whole: bool = False) -> list[Series]:
    """A line of each run that knows the figure: its running median, or as it is."""
    lines = []
    for index, run in enumerate(runs):
        if run.history.known(name):
            colour, form = _look(index)
            line = smoothed(run.history, name, colour, run.name, form)[-1]
            if whole:
                line = line._replace(y=run.history.steps[name])
            lines.append(line._replace(label=run.name, group=run.name))
    return lines


def _held_out(runs: Sequence[ComparedRun], name: str) -> list[Series]:
    lines = [held_out(run.history, name, run.name, *_look(index)) for index, run in enumerate(runs)]
    return [line._replace(group=line.label) for (line,) in filter(None, lines)]


def _look(index: int) -> tuple[str, Any]:
    """Colour and form of a run's lines: dashed once the colours are used up."""
    return _HUES[index % len(_HUES)], "dashed" if index // len(_HUES) % 2 else "solid"


def _without_legend(panel: Panel) -> Panel:
    """A small panel: the legends of the wide ones hide and show a run in all."""
    return panel._replace(series=[line._replace(legend=False) for line in panel.series])


def _upwards(title: str, series: Sequence[Series], kind: Any) -> Panel:
    return Panel(title, series, kind=kind, limits=from_zero(series) if series else (None, None))
