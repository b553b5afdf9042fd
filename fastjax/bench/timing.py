"""How long compiled functions keep the device busy.

On a GPU the profiler's record of each kernel is added up, so that launches, the gaps between kernels and Python do not
count: the rest is the kernels' own time, whatever they are embedded in. Elsewhere (and if the
profiler gives nothing) it is the wall clock from the call to the results.

Functions that are compared are compiled side by side and run by turns, round after round, so that a clock that changes
meets them all; the figure is the median over the rounds. Kernels are launched one by one, not from command buffers,
because the profiler sees a command buffer as one.
"""

import concurrent.futures
import functools
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fastjax.bench.trace import Kernel, busy_ns, read_kernels

_WORKERS = 12
_LONGEST_REASON = 160
#: Modules of the trace are so called, and numbered.
_NAME = "measured_call_"


#: A line of a table by the names that its JSON has.
Row = dict[str, Any]
#: Another library's own way of timing an operation: of the number of rounds, seconds in each of them.
Timed = Callable[[int], list[float]]


class Case(NamedTuple):
    """An operation to be timed.

    Attributes:
        labels: what tells it from others, by the names of its JSON.
        function: of `arguments`; without these its own way of timing (`Timed`), or an Exception: why there is none.
        arguments: arrays on the device.
        calls: operations of the counted kind in a run.
        flops: of an operation; None: no rate.
        nbytes: that an operation must move; None: no rate.
    """

    labels: Mapping[str, Any]
    function: Any
    arguments: tuple[Any, ...] | None = None
    calls: int = 1
    flops: float | None = None
    nbytes: float | None = None


def measure(cases: Sequence[Case], rounds: int) -> list[Row]:
    """Compile side by side, warm up, and time by turns; cases with their own way of timing after the others.

    Args:
        cases: the operations.
        rounds: how often each runs; their median counts.

    Returns:
        For each case its labels, its median, best and worst time in microseconds, its rates, the bytes of its
        temporaries as the compiler plans, and the `source` of the time; without a time `reason` says why.
    """
    compiled = {number: case for number, case in enumerate(cases) if case.arguments is not None}
    with concurrent.futures.ThreadPoolExecutor(_WORKERS) as pool:
        programs: dict[int, Any] = dict(zip(compiled, pool.map(_compile, compiled, compiled.values()), strict=True))
    ready = {
        number: functools.partial(program, *(compiled[number].arguments or ()))
        for number, program in programs.items()
        if not isinstance(program, Exception)
    }
    for number, run in list(ready.items()):
        try:
            for _ in range(2):
                jax.block_until_ready(run())
        except jax.errors.JaxRuntimeError as error:  # out of memory, or no kernel after all
            programs[number] = error
            del ready[number]
    kernels: dict[int, list[float]] = {}
    if ready and jax.default_backend() == "gpu":
        with tempfile.TemporaryDirectory(prefix="fastjax-bench-") as folder:
            with jax.profiler.trace(folder):
                wall = _run(ready, rounds)
            kernels = _kernel_seconds(Path(folder), rounds)
    else:
        wall = _run(ready, rounds)
    rows = []
    for number, case in enumerate(cases):
        if number in ready:
            plan = programs[number].memory_analysis()
            source, totals = ("kernels", kernels[number]) if number in kernels else ("wall clock", wall[number])
            seconds = [total / case.calls for total in totals]
            rows.append(_row(case, seconds, source, None if plan is None else plan.temp_size_in_bytes))
        else:
            rows.append(_row(case, programs.get(number) or _of_another(case.function, rounds), "events"))
    return rows


def _of_another(timed: Timed | Exception, rounds: int) -> list[float] | Exception:
    try:
        return timed if isinstance(timed, Exception) else timed(rounds)
    except Exception as error:  # whatever another library raises
        return error


def _row(case: Case, found: list[float] | Exception, source: str, temporary_bytes: int | None = None) -> Row:
    """A case's figures, from the seconds of an operation in each round or from the reason that there are none."""
    reason = why(found) if isinstance(found, Exception) else None
    seconds = [] if isinstance(found, Exception) else found
    median = statistics.median(seconds) if seconds else None
    rates = {"teraflops_per_second": (case.flops, 1e12), "gigabytes_per_second": (case.nbytes, 1e9)}
    return {
        **case.labels,
        "microseconds": median and 1e6 * median,
        "best": 1e6 * min(seconds) if seconds else None,
        "worst": 1e6 * max(seconds) if seconds else None,
        **{name: amount / median / size if amount and median else None for name, (amount, size) in rates.items()},
        "temporary_bytes": temporary_bytes,
        "source": source if seconds else None,
        "reason": reason,
    }


def why(error: Exception) -> str:
    """The reason why something does not run, in a line."""
    words = " ".join(str(error).split()) or type(error).__name__
    refused = re.fullmatch(r".*: implementation '\w+' cannot serve this call: (.*) \(pass implementation.*", words)
    return (refused[1] if refused else words)[:_LONGEST_REASON]


def _compile(number: int, case: Case) -> Any:
    """The program of a case, or why there is none."""

    def named(*arguments):
        return case.function(*arguments)

    named.__name__ = f"{_NAME}{number}"
    options: dict[str, str | bool] = {"xla_gpu_enable_command_buffer": ""} if jax.default_backend() == "gpu" else {}
    try:
        return jax.jit(named).lower(*(case.arguments or ())).compile(compiler_options=options)
    except Exception as error:
        return error


def _run(ready: Mapping[int, Callable[[], Any]], rounds: int) -> dict[int, list[float]]:
    wall = {number: [] for number in ready}
    for _ in range(rounds):
        for number, run in ready.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            wall[number].append(time.perf_counter() - start)
    return wall


def _kernel_seconds(folder: Path, rounds: int) -> dict[int, list[float]]:
    """Seconds in which a kernel of the call ran, for each run; calls without a clear record are left out."""
    kernels: dict[int, list[Kernel]] = {}
    for kernel in read_kernels(folder):
        if found := re.fullmatch(rf"jit_{_NAME}(\d+)", kernel.module):
            kernels.setdefault(int(found[1]), []).append(kernel)
    return {number: _busy(found, rounds) for number, found in kernels.items() if len(found) % rounds == 0}


def _busy(kernels: list[Kernel], rounds: int) -> list[float]:
    """The busy time in each of `rounds` equal parts, in seconds."""
    size = len(kernels) // rounds
    return [busy_ns(kernels[first : first + size]) * 1e-9 for first in range(0, len(kernels), size)]
