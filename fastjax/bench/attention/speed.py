"""Speed of attention: every case by every contender, forward and forward with backward.

All programs are compiled side by side before the first is timed; those of a case then run by turns. Each goes over as
many sets of inputs as exceed the second-level cache several times, so that it finds none of them there. TFLOP/s count
unmasked work. The share is the time over the unmasked part of the contender's own time for the same rows without the
mask; 1 would be a kernel that loses nothing.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console

from fastjax.bench.attention.cases import NAMES, Case, check_names, make_arrays, make_cases, read_lengths
from fastjax.bench.attention.contenders import CONTENDERS, both, default_contenders, why
from fastjax.bench.results import make_table, save, show
from fastjax.bench.timing import Program, Timing, compile_all, measure
from pallas_kernels import dispatch

DIRECTIONS = ("forward", "both")


@dataclasses.dataclass(frozen=True)
class SpeedCase:
    """Settings of the measurement.

    Attributes:
        cases: of `cases.NAMES`.
        implementations: of `CONTENDERS`; empty: `default_contenders`.
        batch: rows.
        seq: tokens of a short row; a long one has twice as many.
        heads: query heads.
        kv_heads: key heads.
        dtype: of the arrays.
        lengths: a file with the lengths of documents to pack; None: `chat_lengths`.
        cold_bytes: bytes of inputs that a program goes over.
        rounds: runs; their median counts.
    """

    cases: tuple[str, ...] = NAMES
    implementations: tuple[str, ...] = ()
    batch: int = 4
    seq: int = 4096
    heads: int = 32
    kv_heads: int = 8
    dtype: str = "bfloat16"
    lengths: Path | None = None
    cold_bytes: int = 256 * 2**20
    rounds: int = 9


@dataclasses.dataclass(frozen=True)
class SpeedResult:
    """One line of the table; `reason` alone is set where the contender cannot serve the case.

    Attributes:
        case: its name.
        title: the case in words.
        direction: "forward", or "both" for forward and backward pass.
        implementation: the contender.
        milliseconds: median.
        best: smallest.
        worst: largest.
        teraflops_per_second: of the unmasked work.
        times_cudnn: speed over cuDNN's.
        share: the time over the unmasked part of the contender's own for the case without the mask.
        source: how it was timed.
        reason: why there is no time.
    """

    case: str
    title: str
    direction: str
    implementation: str
    milliseconds: float | None = None
    best: float | None = None
    worst: float | None = None
    teraflops_per_second: float | None = None
    times_cudnn: float | None = None
    share: float | None = None
    source: str | None = None
    reason: str | None = None


def run(
    given: SpeedCase | None = None,
    output: Path | None = None,
    plot: Path | None = None,
    console: Console | None = None,
) -> list[SpeedResult]:
    """Measure; show a table for each case as soon as it is known; write files.

    Args:
        given: the settings; the defaults suit a GPU.
        output: JSON file for the case, the device and the results; None: no file.
        plot: PNG of TFLOP/s; None: no file.
        console: for the tables.

    Returns:
        Their lines.

    Raises:
        ConfigError: sizes or lengths that do not fit.
        OSError: a file that cannot be read or written.
    """
    given, console = given or SpeedCase(), console or Console()
    check_names("--cases", given.cases, NAMES)
    check_names("--implementations", given.implementations, tuple(CONTENDERS))
    lengths = None if given.lengths is None else read_lengths(given.lengths)
    cases = make_cases(given.cases, given.batch, given.seq, given.heads, given.kv_heads, lengths)
    names = given.implementations or tuple(default_contenders())
    programs = {case.name: _programs(case, names, given) for case in cases}
    compiled = compile_all(
        [program for found in programs.values() for program in found if isinstance(program, Program)]
    )
    results: list[SpeedResult] = []
    for case in cases:
        found = _measured(case, programs[case.name], compiled, given)
        results += _compared(case, names, found, cases, results)
        _show(console, [line for line in results if line.case == case.name])
    documents = {case.name: case.documents for case in cases}
    save(output, results, console, case=dataclasses.asdict(given), documents=documents)
    if plot is not None:
        from fastjax.bench.attention.plot import draw  # matplotlib takes a while to import

        plot.write_bytes(draw(results, f"Attention · {dispatch.target()} · {given.dtype} · jax {jax.__version__}"))
        console.print(f"written to {plot}", highlight=False)
    return results


def _name(case: Case, implementation: str, direction: str) -> str:
    return f"{case.name}_{implementation}_{direction}"


def _copies(case: Case, given: SpeedCase) -> int:
    """Sets of inputs that together exceed any cache."""
    numbers = 2 * case.batch * case.length * (case.heads + case.kv_heads) * case.size
    return max(1, -(-given.cold_bytes // (numbers * jnp.dtype(given.dtype).itemsize)))


def _programs(case: Case, names: Sequence[str], given: SpeedCase) -> list[Program | tuple[str, Exception]]:
    """A case's programs; (name, error) for a contender that cannot serve it."""
    copies = _copies(case, given)
    shapes = tuple(jax.eval_shape(lambda: make_arrays(case, given.dtype, copies)))
    found: list[Program | tuple[str, Exception]] = []
    for implementation in names:
        for direction in DIRECTIONS:
            name = _name(case, implementation, direction)
            try:
                attend = CONTENDERS[implementation](case)
            except Exception as error:
                found.append((name, error))
                continue
            function = both(attend) if direction == "both" else attend
            found.append(Program(name, _over_all(function), shapes, copies))
    return found


def _over_all(function: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    def run(*sets: dict[str, Any]) -> list[Any]:
        return [function(arrays) for arrays in sets]

    return run


def _measured(
    case: Case,
    programs: Sequence[Program | tuple[str, Exception]],
    compiled: dict[str, Callable[..., Any] | Exception],
    given: SpeedCase,
) -> dict[str, Timing | Exception]:
    """By name of the program its time, or its error."""
    found: dict[str, Timing | Exception] = {}
    ready: dict[str, Callable[..., Any]] = {}
    runnable = []
    arrays = tuple(make_arrays(case, given.dtype, _copies(case, given)))
    for program in programs:
        if not isinstance(program, Program):
            found[program[0]] = program[1]
            continue
        function = compiled[program.name]
        if isinstance(function, Exception):
            found[program.name] = function
            continue
        try:
            jax.block_until_ready(function(*arrays))
        except jax.errors.JaxRuntimeError as error:  # out of memory, or no kernel after all
            found[program.name] = error
            continue
        ready[program.name] = function
        runnable.append(program._replace(arguments=arrays))
    return found | (measure(runnable, given.rounds, ready) if runnable else {})


def _compared(
    case: Case,
    names: Sequence[str],
    found: dict[str, Timing | Exception],
    cases: Sequence[Case],
    before: Sequence[SpeedResult],
) -> list[SpeedResult]:
    """The lines of a case beside cuDNN's and beside those without the mask."""
    lines = []
    for direction in DIRECTIONS:
        cudnn = found.get(_name(case, "cudnn", direction))
        for implementation in names:
            timing = found[_name(case, implementation, direction)]
            line = SpeedResult(case.name, str(case), direction, implementation)
            if not isinstance(timing, Timing):
                lines.append(dataclasses.replace(line, reason=why(timing)))
                continue
            dense = [other for other in cases if other.name == case.dense]
            seconds = [
                other.milliseconds
                for other in before
                if (other.case, other.direction, other.implementation) == (case.dense, direction, implementation)
            ]
            share = None
            if dense and seconds and seconds[0] is not None:
                left = case.operations(direction) / dense[0].operations(direction)
                share = timing.median * 1e3 / (seconds[0] * left)
            lines.append(
                dataclasses.replace(
                    line,
                    milliseconds=timing.median * 1e3,
                    best=timing.best * 1e3,
                    worst=timing.worst * 1e3,
                    teraflops_per_second=case.operations(direction) / timing.median / 1e12,
                    times_cudnn=cudnn.median / timing.median if isinstance(cudnn, Timing) else None,
                    share=share,
                    source=timing.source,
                )
            )
    return lines


def _show(console: Console, lines: Sequence[SpeedResult]) -> None:
    numbers = ("ms", "best–worst", "TFLOP/s", "× cuDNN", "share")
    table = make_table(f"attention · {lines[0].title} · {dispatch.target()}", ("", "by"), numbers)
    for line in lines:
        if line.milliseconds is None:
            continue
        table.add_row(
            line.direction,
            line.implementation,
            _written(line.milliseconds, 3),
            f"{_written(line.best, 3)}–{_written(line.worst, 3)}",
            _written(line.teraflops_per_second, 0 if (line.teraflops_per_second or 0) >= 10 else 3),
            _written(line.times_cudnn, 2),
            _written(line.share, 2),
        )
    show(console, table, [(line.implementation, line.reason) for line in lines if line.reason])


def _written(number: float | None, digits: int) -> str:
    return "" if number is None else f"{number:,.{digits}f}"
