"""Cases of a step measured one after the other, and what is made of them.

Every case runs in a fresh process, because a device's peak memory cannot be reset; so does the comparison with the
reference before, once for cases whose layers compute the same.
"""

import concurrent.futures
import dataclasses
import json
import multiprocessing
from collections.abc import Hashable, Sequence
from pathlib import Path

from rich.console import Console

from fastjax.bench.step.case import StepCase
from fastjax.bench.step.measure import StepResult, check, measure
from fastjax.bench.step.table import markdown, print_results
from fastjax.errors import TrainingError


def run(
    cases: Sequence[StepCase],
    *,
    output: Path | None = None,
    text: Path | None = None,
    profile: Path | None = None,
    console: Console | None = None,
) -> list[StepResult]:
    """Measure each case in a process of its own, show tables, write files.

    Args:
        cases: of one model.
        output: JSON file for cases and results; None: no file.
        text: Markdown file for the table; None: no file.
        profile: folder for a trace of each case, numbered as the cases are; None: no traces.
        console: for the tables.

    Returns:
        The results, in the order of the cases.

    Raises:
        ConfigError: settings that the model does not take.
        TrainingError: steps that do not train, after the tables and files of the others.
    """
    console = console or Console()
    results, checks = [], {}
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as pool:
        for number, case in enumerate(cases):
            trace, key = None if profile is None else profile / str(number), _checked_once(case)
            with console.status(f"{case.preset} {case.rows} {case.checkpointing} {case.layer_loop}"):
                if key not in checks:
                    checks[key] = pool.submit(check, case).result()
                bad = checks[key].fault or checks[key].error
                results.append(checks[key] if bad else pool.submit(measure, case, trace).result())
    measured = list(zip(cases, results, strict=True))
    print_results(console, measured)
    if profile is not None:
        traced = any(result.profile is not None for result in results)
        console.print(
            f"traces in {profile}" + ("" if traced else ", without kernels: there is no GPU"), highlight=False
        )
    files = {}
    if output is not None:
        rows = [dataclasses.asdict(case) | dataclasses.asdict(result) for case, result in measured]
        files[output] = (json.dumps(rows, indent=1) + "\n").encode()
    if text is not None:
        files[text] = markdown(measured).encode()
    for file, content in files.items():
        file.write_bytes(content)
        console.print(f"written to {file}", highlight=False)
    faults = sum(result.fault is not None for result in results)
    if faults:
        raise TrainingError(f"bench step: {faults} of {len(cases)} cases gave no figure: the reasons are above")
    return results


def _checked_once(case: StepCase) -> Hashable:
    """Equal for cases that one comparison with the reference serves."""
    return case.preset, case.method, case.weights, case.adapters, case.dtype, case.attention
