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
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fastjax.bench.trace import Kernel, busy_ns, read_kernels

_WORKERS = 12


class Program(NamedTuple):
    """A function to be timed.

    Attributes:
        name: a unique Python identifier.
        function: of `arguments`; it is jitted here.
        arguments: arrays on the device; to compile alone, their shapes suffice.
        calls: operations of the counted kind in a run.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    calls: int


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


def compile_all(programs: Sequence[Program]) -> dict[str, Callable[..., Any] | Exception]:
    """Compile side by side.

    Args:
        programs: the programs.

    Returns:
        By name the compiled function, or why it cannot be compiled.
    """
    return side_by_side({program.name: functools.partial(_compile, program) for program in programs})


def side_by_side(jobs: Mapping[Any, Callable[[], Any]]) -> dict[Any, Any]:
    """By name the result of each job, or its error; the jobs run in threads."""

    def attempt(job: Callable[[], Any]) -> Any:
        try:
            return job()
        except Exception as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(_WORKERS) as pool:
        return dict(zip(jobs, pool.map(attempt, jobs.values()), strict=True))


def measure(programs: Sequence[Program], rounds: int = 9) -> dict[str, Timing | Exception]:
    """Compile side by side, warm up, and time by turns.

    Args:
        programs: the programs.
        rounds: how often each runs.

    Returns:
        By name the time of one call of the program's operation, or why it cannot be compiled or run.
    """
    compiled: dict[str, Any] = compile_all(programs)
    failed: dict[str, Exception] = {name: found for name, found in compiled.items() if isinstance(found, Exception)}
    for program in programs:
        try:
            for _ in range(0 if program.name in failed else 2):
                jax.block_until_ready(compiled[program.name](*program.arguments))
        except jax.errors.JaxRuntimeError as error:  # out of memory, or no kernel after all
            failed[program.name] = error
    programs = [program for program in programs if program.name not in failed]
    kernels: dict[str, list[float]] = {}
    if programs and jax.default_backend() == "gpu":
        with tempfile.TemporaryDirectory(prefix="fastjax-bench-") as folder:
            with jax.profiler.trace(folder):
                wall = _run(programs, compiled, rounds)
            kernels = _kernel_seconds(Path(folder), rounds)
    else:
        wall = _run(programs, compiled, rounds)
    timings: dict[str, Timing | Exception] = dict(failed)
    for program in programs:
        source = "kernels" if program.name in kernels else "wall clock"
        totals = (kernels if source == "kernels" else wall)[program.name]
        plan = compiled[program.name].memory_analysis()
        planned = None if plan is None else plan.temp_size_in_bytes
        timings[program.name] = timing_of([total / program.calls for total in totals], source, planned)
    return timings


def _compile(program: Program) -> Callable[..., Any]:
    def named(*arguments):
        return program.function(*arguments)

    named.__name__ = program.name
    options: dict[str, str | bool] = {"xla_gpu_enable_command_buffer": ""} if jax.default_backend() == "gpu" else {}
    return jax.jit(named).lower(*program.arguments).compile(compiler_options=options)


def _run(
    programs: Sequence[Program], compiled: Mapping[str, Callable[..., Any]], rounds: int
) -> dict[str, list[float]]:
    wall = {program.name: [] for program in programs}
    for _ in range(rounds):
        for program in programs:
            start = time.perf_counter()
            jax.block_until_ready(compiled[program.name](*program.arguments))
            wall[program.name].append(time.perf_counter() - start)
    return wall


def _kernel_seconds(folder: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds in which a kernel of the program ran, for each run; programs without a clear record are left out."""
    kernels: dict[str, list[Kernel]] = {}
    for kernel in read_kernels(folder):
        if kernel.module.startswith("jit_"):
            kernels.setdefault(kernel.module.removeprefix("jit_"), []).append(kernel)
    return {name: _busy(found, rounds) for name, found in kernels.items() if len(found) % rounds == 0}


def _busy(kernels: list[Kernel], rounds: int) -> list[float]:
    """The busy time in each of `rounds` equal parts, in seconds."""
    size = len(kernels) // rounds
    return [busy_ns(kernels[first : first + size]) * 1e-9 for first in range(0, len(kernels), size)]
