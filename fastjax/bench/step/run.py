"""Cases of a step measured one after the other, and what is made of them.

Every case runs in a fresh process, because a device's peak memory cannot be reset. Afterwards the cases' first losses
are compared with each other.
"""

import concurrent.futures
import importlib.metadata
import json
import multiprocessing
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from fastjax.bench.step import peers
from fastjax.bench.step.case import StepCase
from fastjax.bench.step.first_loss import with_equal_first_losses
from fastjax.bench.step.measure import StepResult, measure
from fastjax.bench.step.table import OURS, Line, print_results, rows_of
from fastjax.errors import TrainingError


def run(
    cases: Sequence[StepCase],
    *,
    command: str | None = None,
    output: Path | None = None,
    profile: Path | None = None,
    console: Console | None = None,
) -> list[StepResult]:
    """Measure each case in a process of its own, show a table, write a file; Unsloth too where it is installed.

    Args:
        cases: of one model.
        command: that measures them, for the JSON file; None: it is not known.
        output: JSON file for cases and results, with the day (UTC) and the command; None: no file.
        profile: folder for a trace of each case, numbered as the cases are; None: no traces.
        console: for the table.

    Returns:
        The results, in the order of the cases.

    Raises:
        ConfigError: settings that the model or the devices do not take.
        TrainingError: steps that do not train, after the table and the file of the others.
    """
    console, lines, judged = console or Console(), [], []
    about = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "command": command}
    absent = peers.why_not(next((case for case in cases if case.mesh is None), cases[0]))
    traces = [() if profile is None else (profile / str(number),) for number in range(len(cases))]
    jobs: list[Any] = [(case, OURS, measure, more) for case, more in zip(cases, traces, strict=True)]
    if not absent:
        label = f"Unsloth {importlib.metadata.version('unsloth')}"
        jobs += [(case, label, peers.measure_unsloth, ()) for case in peers.cases_of(cases)]
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as pool:
        for case, by, function, more in jobs:
            with console.status(f"{by} {case.model} {case.where} {case.rows} {case.kept} {case.layer_loop}"):
                lines.append(Line(case, pool.submit(function, case, *more).result(), by))
            judged = with_equal_first_losses(lines)
            if output is not None:  # what is measured outlives a later case that is cut off
                output.write_text(json.dumps(rows_of(judged, **about), indent=1) + "\n", encoding="utf-8")
            newest = judged[-1].result
            told = newest.fault or newest.error or f"{1e3 * (newest.step_seconds or 0):,.1f} ms"
            console.print(f"{' '.join(judged[-1].names)}: {told}", highlight=False, markup=False)
    print_results(console, judged)
    if absent:
        console.print(f"Unsloth: {absent}", highlight=False)
    if profile is not None:
        console.print(f"traces in {profile}", highlight=False)
    if output is not None:
        console.print(f"written to {output}", highlight=False)
    if faults := sum(line.result.fault is not None for line in judged):
        raise TrainingError(f"bench step: {faults} of {len(judged)} cases gave no figure: the reasons are above")
    return [line.result for line in judged[: len(cases)]]
