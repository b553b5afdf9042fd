"""How long compiled functions keep the device busy.

On a GPU the profiler's record of each kernel is added up, so that launches, the gaps between kernels and Python do not
count: the rest is the kernels' own time, whatever they are embedded in. Elsewhere (and if the
profiler gives nothing) it is the wall clock from the call to the results.

Functions that are compared are compiled side by side and run by turns, round after round, so that a clock that changes
meets them all; the figure is the median over the rounds. Kernels are launched one by one, not from command buffers,
because the profiler sees a command buffer as one.
"""

import concurrent.futures
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
        source: "kernels" (device time of the kernels) or "wall clock".
    """

    median: float
    best: float
    worst: float
    source: str


def compile_all(programs: Sequence[Program]) -> dict[str, Callable[..., Any] | Exception]:
    """Compile side by side.

    Args:
        programs: the programs.

    Returns:
        By name the compiled function, or why it cannot be compiled.
    """

    def attempt(program: Program) -> Callable[..., Any] | Exception:
        try:
            return _compile(program)
        except Exception as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(_WORKERS) as pool:
        return dict(zip((program.name for program in programs), pool.map(attempt, programs), strict=True))


def measure(
    programs: Sequence[Program], rounds: int = 9, compiled: Mapping[str, Callable[..., Any]] | None = None
) -> dict[str, Timing]:
    """Compile, warm up and time.

    Args:
        programs: the programs.
        rounds: how often each runs.
        compiled: by name, the results of `compile_all`; None: they are compiled here.

    Returns:
        The time of one call of each program's operation, by name.

    Raises:
        Exception: the error of a program that cannot be compiled.
    """
    if compiled is None:
        compiled = {}
        for name, result in compile_all(programs).items():
            if isinstance(result, Exception):
                raise result
            compiled[name] = result
    for program in programs:
        for _ in range(2):
            jax.block_until_ready(compiled[program.name](*program.arguments))
    if jax.default_backend() == "gpu":
        with tempfile.TemporaryDirectory(prefix="fastjax-bench-") as folder:
            with jax.profiler.trace(folder):
                wall = _run(programs, compiled, rounds)
            kernels = _kernel_seconds(Path(folder), rounds)
    else:
        wall, kernels = _run(programs, compiled, rounds), {}
    timings = {}
    for program in programs:
        source = "kernels" if program.name in kernels else "wall clock"
        seconds = [total / program.calls for total in (kernels if source == "kernels" else wall)[program.name]]
        timings[program.name] = Timing(statistics.median(seconds), min(seconds), max(seconds), source)
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
