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
#: Modules of the trace are so called, and numbered.
_NAME = "measured_call_"


class Call(NamedTuple):
    """A function to be timed.

    Attributes:
        function: of `arguments`; it is jitted here.
        arguments: arrays on the device; to compile alone, their shapes suffice.
        calls: operations of the counted kind in a run.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    calls: int = 1


class Timing(NamedTuple):
    """Seconds of one operation.

    Attributes:
        median: over the rounds.
        best: smallest.
        worst: largest.
        source: "kernels" (device time of the kernels), "wall clock", or a peer's.
        temporary_bytes: the program's, as the compiler plans; None: it does not say.
    """

    median: float
    best: float
    worst: float
    source: str
    temporary_bytes: int | None = None


def timing_of(seconds: Sequence[float], source: str, temporary_bytes: int | None = None) -> Timing:
    """The timing of an operation from its seconds in each round."""
    return Timing(statistics.median(seconds), min(seconds), max(seconds), source, temporary_bytes)


def compile_all(calls: Sequence[Call]) -> list[Any]:
    """Compile side by side.

    Args:
        calls: the functions.

    Returns:
        Each compiled, or why it cannot be.
    """
    return side_by_side([functools.partial(_compile, number, call) for number, call in enumerate(calls)])


def side_by_side(jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """The result of each job, or its error; the jobs run in threads."""

    def attempt(job: Callable[[], Any]) -> Any:
        try:
            return job()
        except Exception as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(_WORKERS) as pool:
        return list(pool.map(attempt, jobs))


def measure(calls: Sequence[Call], rounds: int = 9) -> list[Timing | Exception]:
    """Compile side by side, warm up, and time by turns.

    Args:
        calls: the functions.
        rounds: how often each runs.

    Returns:
        The time of one operation of each, or why it cannot be compiled or run.
    """
    found = compile_all(calls)
    ready = {
        number: functools.partial(found[number], *call.arguments)
        for number, call in enumerate(calls)
        if not isinstance(found[number], Exception)
    }
    for number, run in list(ready.items()):
        try:
            for _ in range(2):
                jax.block_until_ready(run())
        except jax.errors.JaxRuntimeError as error:  # out of memory, or no kernel after all
            found[number] = error
            del ready[number]
    kernels: dict[int, list[float]] = {}
    if ready and jax.default_backend() == "gpu":
        with tempfile.TemporaryDirectory(prefix="fastjax-bench-") as folder:
            with jax.profiler.trace(folder):
                wall = _run(ready, rounds)
            kernels = _kernel_seconds(Path(folder), rounds)
    else:
        wall = _run(ready, rounds)
    for number in ready:
        source = "kernels" if number in kernels else "wall clock"
        totals = (kernels if source == "kernels" else wall)[number]
        plan = found[number].memory_analysis()
        planned = None if plan is None else plan.temp_size_in_bytes
        found[number] = timing_of([total / calls[number].calls for total in totals], source, planned)
    return found


def _compile(number: int, call: Call) -> Callable[..., Any]:
    def named(*arguments):
        return call.function(*arguments)

    named.__name__ = f"{_NAME}{number}"
    options: dict[str, str | bool] = {"xla_gpu_enable_command_buffer": ""} if jax.default_backend() == "gpu" else {}
    return jax.jit(named).lower(*call.arguments).compile(compiler_options=options)


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
