"""The report at the end of a run: `report.html`, one self-contained page.

Its source is metrics.jsonl, so resumed, interrupted and failed runs have one too.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from convert.files import atomic_file
from fastjax.training.metrics import read_rows
from fastjax.training.report.charts import render_page
from fastjax.training.report.environment import describe_environment, describe_peaks
from fastjax.training.report.facts import about, headline, list_evaluations, list_events, list_samples, list_spikes
from fastjax.training.report.history import DEVIATIONS, LEAST_SPREAD, WINDOW, History, find_spikes
from fastjax.training.report.panels import panels
from fastjax.training.report.settings import default_settings, list_settings
from fastjax.training.report.usage import usage, usage_of_run

__all__ = ["default_settings", "describe_environment", "describe_peaks", "usage", "usage_of_run", "write_report"]


def write_report(
    folder: Path,
    *,
    config: Mapping[str, Any],
    statistics: Mapping[str, str],
    environment: Mapping[str, str],
    result: Sequence[str],
    status: str,
    console: Console | None = None,
) -> Path | None:
    """Write a run's `report.html`; a failure is only a warning, as the run's result stands.

    Args:
        folder: the run's output folder, with metrics.jsonl.
        config: the settings: section → key → value.
        statistics: data set → its statistics in words.
        environment: `describe_environment()`.
        result: commands for the result, as from `usage`; empty without a result.
        status: the end of the run: "finished", or its cause.
        console: for the warning; None: standard error.

    Returns:
        The page; None: it could not be written.
    """
    try:
        return _write(folder, config, statistics, environment, result, status)
    except Exception as error:
        message = f"warning: no report in {folder}: {type(error).__name__}: {error}"
        console = console or Console(stderr=True)
        console.print(message, style="yellow", highlight=False, markup=False, soft_wrap=True)
        return None


def _write(
    folder: Path,
    config: Mapping[str, Any],
    statistics: Mapping[str, str],
    environment: Mapping[str, str],
    result: Sequence[str],
    status: str,
) -> Path:
    history = History.from_rows(read_rows(folder / "metrics.jsonl"))
    spikes = find_spikes(history.steps["step"], history.steps["loss"])
    plots = []
    if len(history.steps["step"]) or history.evaluations:
        plots = panels(history, spikes, config.get("optimizer", {}).get("max_grad_norm"))
    settings = list_settings(config, default_settings())
    facts = headline(history)
    html = render_page(
        "page.html.jinja",
        plots,
        history.extent,
        name=config.get("output", {}).get("run_name") or folder.resolve().name,
        status=status,
        finished=status.startswith("finished"),
        about=about(config, environment),
        facts=facts,
        tile_columns=-(-len(facts) // -(-len(facts) // 6)) if facts else 1,
        result=result,
        evaluations=list_evaluations(history),
        spikes={
            **list_spikes(spikes),
            "deviations": f"{DEVIATIONS:g}",
            "window": WINDOW,
            "least": f"{LEAST_SPREAD:.0%}",
        },
        samples=list_samples(history),
        events=list_events(history),
        statistics=statistics,
        environment=environment,
        changed=[setting for setting in settings if setting.changed],
        unchanged=[setting for setting in settings if not setting.changed],
    )
    with atomic_file(folder / "report.html") as file:
        file.write(html.encode())
    return folder / "report.html"
