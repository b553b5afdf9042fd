"""Cases of a step measured one after the other, and what is made of them.

Every case runs in a fresh process, because a device's peak memory cannot be reset; so does the comparison with the
reference before, of all small steps that share one. Afterwards the cases' first losses are compared with each other.
"""

import concurrent.futures
import dataclasses
import json
import multiprocessing
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from fastjax.bench.step import peers
from fastjax.bench.step.case import StepCase
from fastjax.bench.step.first_loss import with_equal_first_losses
from fastjax.bench.step.measure import StepResult, check, measure
from fastjax.bench.step.mesh import check_meshes
from fastjax.bench.step.small import reference_step, small_step
from fastjax.bench.step.table import Line, Measured, draw, markdown, print_results, summary, with_shares
from fastjax.errors import TrainingError

#: What each row of the JSON file has beside its case and result.
About = dict[str, str | None]


def run(
    cases: Sequence[StepCase],
    *,
    command: str | None = None,
    output: Path | None = None,
    text: Path | None = None,
    plot: Path | None = None,
    profile: Path | None = None,
    console: Console | None = None,
) -> list[StepResult]:
    """Measure each case in a process of its own, show tables, write files; then Unsloth where it is installed.

    Args:
        cases: of one model.
        command: that measures them, for the JSON file; None: it is not known.
        output: JSON file for cases and results, with the day (UTC) and the command; None: no file.
        text: Markdown file for the table; None: no file.
        plot: PNG for speed and memory; None: no picture.
        profile: folder for a trace of each case, numbered as the cases are; None: no traces.
        console: for the tables.

    Returns:
        The results, in the order of the cases.

    Raises:
        ConfigError: settings that the model or the devices do not take.
        TrainingError: steps that do not train, after the tables and files of the others.
    """
    console = console or Console()
    raw: list[Line] = []
    checks: dict[StepCase, StepResult] = {}
    about = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "command": command}
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as pool:
        if any(case.mesh is not None for case in cases):
            pool.submit(check_meshes, cases).result()
        small = [small_step(case) for case in cases]
        for number, (case, own) in enumerate(zip(cases, small, strict=True)):
            trace = None if profile is None else profile / str(number)
            with console.status(f"{case.preset} {case.where} {case.rows} {case.checkpointing} {case.layer_loop}"):
                if own not in checks:
                    beside = [other for other in dict.fromkeys(small) if reference_step(other) == reference_step(own)]
                    checks.update(zip(beside, pool.submit(check, beside).result(), strict=True))
                bad = checks[own].fault or checks[own].error
                raw.append(Line(case, checks[own] if bad else pool.submit(measure, case, trace).result()))
            measured = with_equal_first_losses(raw)
            _tell(console, measured, output, about)
        absent = peers.why_not(next((case for case in cases if case.mesh is None), cases[0]))
        for case in () if absent else peers.cases_of(cases):
            with console.status(f"{peers.label()} {case.preset} {case.rows} {case.checkpointing}"):
                raw.append(Line(case, pool.submit(peers.measure_unsloth, case).result(), peers.label()))
            measured = with_equal_first_losses(raw)
            _tell(console, measured, output, about)
    print_results(console, measured)
    if absent:
        console.print(f"Unsloth: {absent}", highlight=False)
    if profile is not None:
        traced = any(line.result.profile is not None for line in measured)
        console.print(f"traces in {profile}{'' if traced else ', without kernels: there is no GPU'}", highlight=False)
    for file, content in ((output, partial(_json, about=about)), (text, _markdown), (plot, _png)):
        if file is not None:
            file.write_bytes(content(measured))
            console.print(f"written to {file}", highlight=False)
    faults = sum(line.result.fault is not None for line in measured)
    if faults:
        raise TrainingError(f"bench step: {faults} of {len(measured)} cases gave no figure: the reasons are above")
    return [line.result for line in measured[: len(cases)]]


def _tell(console: Console, measured: Measured, output: Path | None, about: About) -> None:
    """Show the newest line and keep it: what is measured outlives a later case that is cut off."""
    console.print(summary(measured[-1]), highlight=False, markup=False)
    if output is not None:
        output.write_bytes(_json(measured, about))


def _json(measured: Measured, about: About) -> bytes:
    rows = []
    for line in with_shares(measured):
        case = dataclasses.asdict(line.case) | {"mesh": line.case.where, "devices": line.case.devices}
        figures = {"tokens_per_second_per_device": line.per_device, "share_of_linear": line.share}
        rows.append({"by": line.by} | about | case | dataclasses.asdict(line.result) | figures)
    return (json.dumps(rows, indent=1) + "\n").encode()


def _markdown(measured: Measured) -> bytes:
    return markdown(measured).encode()


def _png(measured: Measured) -> bytes:
    case, result = measured[0].case, measured[0].result
    return draw(measured, f"Step · {case.model} · {case.trained} · {result.device} · jax {result.jax}")
