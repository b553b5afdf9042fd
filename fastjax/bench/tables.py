"""Measurements as tables of cases: timed by turns, compared, printed and written as JSON in one way."""

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from rich import box
from rich.console import Console
from rich.table import Table

from fastjax.bench import timing
from fastjax.bench.timing import Call, Timing
from pallas_kernels import dispatch

_LONGEST_REASON = 160
_UNITS = {"milliseconds": ("ms", 1e3), "microseconds": ("µs", 1e6)}

#: A line of a table by the names that its JSON has.
Row = dict[str, Any]
#: The text of a row's cell.
Cell = Callable[[Any], str]
#: Another library's own way of timing an operation, of the number of rounds.
Timed = Callable[[int], Timing]


class Case(NamedTuple):
    """An operation to be timed.

    Attributes:
        labels: what tells it from others, by the names of its JSON.
        function: of `arguments`; without these its own way of timing (`Timed`), or an Exception: why there is none.
        arguments: arrays on the device.
        calls: operations in a run.
        flops: of an operation; None: no rate.
        nbytes: that an operation must move; None: no rate.
    """

    labels: Mapping[str, Any]
    function: Any
    arguments: tuple[Any, ...] | None = None
    calls: int = 1
    flops: float | None = None
    nbytes: float | None = None


class Beside(NamedTuple):
    """A figure of a row beside another one, of its table or of one before.

    Attributes:
        labels: of a row those that the other one has; None: there is none.
        figure: of the row and the other one.
    """

    labels: Callable[[Row], Mapping[str, Any] | None]
    figure: Callable[[Row, Row], float]


class Bench(NamedTuple):
    """A benchmark.

    Attributes:
        settings: a dataclass of what is measured, with `rounds`; the defaults suit a GPU.
        tables: of the settings, one after the other: title and cases.
        words: name of a column → its cell.
        numbers: those that follow the time, aligned to the right.
        unit: "milliseconds" or "microseconds".
        beside: name of a figure → how it is found beside another row.
    """

    settings: type
    tables: Callable[[Any], Iterator[tuple[str, list[Case]]]]
    words: Mapping[str, Cell]
    numbers: Mapping[str, Cell]
    unit: str = "milliseconds"
    beside: Mapping[str, "Beside"] = MappingProxyType({})


def run(
    bench: Bench, settings: Any, output: Path | None = None, console: Console | None = None, **about: Any
) -> list[Row]:
    """Measure; show each table as soon as it is known; write a file.

    Args:
        bench: the benchmark.
        settings: an instance of its dataclass.
        output: JSON file for the settings, the device and the rows; None: no file.
        console: for the tables; None: standard output.
        **about: further entries of the file.

    Returns:
        The rows of all tables.

    Raises:
        ConfigError: settings that do not fit.
        OSError: a file that cannot be read or written.
    """
    console, found = console or Console(), []
    for title, cases in bench.tables(settings):
        rows = measure(cases, settings.rounds, bench.unit)
        found += rows
        for row, (name, (labels, figure)) in itertools.product(rows, bench.beside.items()):
            wanted = labels(row) if row["reason"] is None else None
            other = None if wanted is None else _find(found, wanted)
            row[name] = None if other is None else figure(row, other)
        unit, _ = _UNITS[bench.unit]
        times = {unit: number(bench.unit, _written), "best–worst": number("best–worst", _written)}
        title = f"{title} · {dispatch.target()} · jax {jax.__version__}"
        caption = f"median of {settings.rounds}, time by {_sources(rows)}"
        print_rows(console, title, rows, bench.words, times | dict(bench.numbers), caption)
        del cases  # their arrays make room for the next table's
    save(output, found, console, case=dataclasses.asdict(settings), **about)
    return found


def measure(cases: Sequence[Case], rounds: int, unit: str = "milliseconds") -> list[Row]:
    """Time cases by turns, those with their own way of timing after the others.

    Args:
        cases: the cases.
        rounds: runs; their median counts.
        unit: of the times, and the name of the median.

    Returns:
        For each case its labels, its times and rates; without a time `reason` says why.
    """
    own = [Call(case.function, case.arguments, case.calls) for case in cases if case.arguments is not None]
    timings = iter(timing.measure(own, rounds))
    results = [next(timings) if case.arguments is not None else _of_another(case.function, rounds) for case in cases]
    return [_row(case, result, unit) for case, result in zip(cases, results, strict=True)]


def _of_another(timed: Timed | Exception, rounds: int) -> Timing | Exception:
    try:
        return timed if isinstance(timed, Exception) else timed(rounds)
    except Exception as error:  # whatever another library raises
        return error


def _row(case: Case, result: Timing | Exception, unit: str) -> Row:
    reason, seconds = None, None
    if isinstance(result, Exception):
        reason, result = why(result), Timing(*[None] * 5)  # pyright: ignore[reportArgumentType]
    else:
        seconds = result.median
    _, scale = _UNITS[unit]

    def over(amount: float | None, size: float) -> float | None:
        return None if amount is None or seconds is None else amount / seconds / size

    return {
        **case.labels,
        **{
            name: None if value is None else value * scale
            for name, value in zip((unit, "best", "worst"), result[:3], strict=True)
        },
        "teraflops_per_second": over(case.flops, 1e12),
        "gigabytes_per_second": over(case.nbytes, 1e9),
        "temporary_bytes": result.temporary_bytes,
        "source": result.source,
        "reason": reason,
    }


def _find(rows: Iterable[Row], labels: Mapping[str, Any]) -> Row | None:
    """The row that has these labels, and a time; None: there is none."""
    fitting = (row for row in rows if row["reason"] is None)
    return next((row for row in fitting if labels.items() <= row.items()), None)


def word(name: str) -> Cell:
    """A cell with what is so called; empty for None."""
    return lambda row: "" if row[name] is None else str(row[name])


def number(names: str, form: str | Callable[[float], str], suffix: str = "") -> Cell:
    """A cell with a number; empty for None.

    Args:
        names: its name, or two joined by a dash.
        form: Python's for it.
        suffix: behind it.
    """
    write = form if callable(form) else lambda value: format(value, form)

    def cell(row: Row) -> str:
        values = [row[name] for name in names.split("–")]
        return "" if None in values else "–".join(map(write, values)) + suffix

    return cell


def print_rows(
    console: Console,
    title: str,
    rows: Sequence[Any],
    words: Mapping[str, Cell],
    numbers: Mapping[str, Cell],
    caption: str | None = None,
    reason: Callable[[Any], str | None] = lambda row: row["reason"],
) -> None:
    """Print a table and, below it, why rows have no figure: each reason once.

    Its columns are close enough that eight or nine fit into a line of 80.

    Args:
        console: where to.
        title: above it.
        rows: its rows.
        words: name of a column → its cell.
        numbers: those that follow, aligned to the right.
        caption: below the table.
        reason: of a row without figures; None: it has some.
    """
    shape: dict[str, Any] = {"box": box.SIMPLE_HEAD, "pad_edge": False, "padding": 0}
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left", **shape)
    for name in (*words, *numbers):
        table.add_column(name, justify="left" if name in words else "right", no_wrap=True)
    missing: dict[tuple[str, str], None] = {}
    for row in rows:
        names = [cell(row) for cell in words.values()]
        if (why_not := reason(row)) is None:
            table.add_row(*names, *(cell(row) for cell in numbers.values()))
        else:
            missing[" ".join(filter(None, names)), why_not] = None
    if table.row_count:
        console.print(table)
    else:
        console.print(title, highlight=False, markup=False)
    for names, why_not in missing:
        console.print(f"{names}: {why_not}", highlight=False, markup=False)


def as_markdown(rows: Iterable[Sequence[str]], words: Sequence[str], numbers: Sequence[str]) -> str:
    """A table in Markdown, its numbers aligned to the right."""
    lines = [(*words, *numbers), ("---",) * len(words) + ("---:",) * len(numbers), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def save(output: Path | None, rows: Sequence[Row], console: Console, **about: Any) -> None:
    """Write rows, with the device and JAX's version, and say so.

    Args:
        output: the file; None: none is written.
        rows: the rows.
        console: for the message.
        **about: further entries of the file.
    """
    if output is None:
        return
    facts = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, **about, "results": rows}
    output.write_text(json.dumps(facts, indent=1, default=str) + "\n", encoding="utf-8")
    console.print(f"written to {output}", highlight=False)


def why(error: Exception) -> str:
    """The reason why something does not run, in a line."""
    words = " ".join(str(error).split()) or type(error).__name__
    refused = re.fullmatch(r".*: implementation '\w+' cannot serve this call: (.*) \(pass implementation.*", words)
    return (refused[1] if refused else words)[:_LONGEST_REASON]


def _written(time: float) -> str:
    """A time with four digits that count, and three after the point at most."""
    return f"{time:,.{next((digits for digits, least in enumerate((1000, 100, 10)) if time >= least), 3)}f}"


def _sources(rows: Sequence[Row]) -> str:
    """The methods of timing, the first one's of all rows but those that are named with another."""
    by: dict[str, list[str]] = {}
    for row in rows:
        if row["source"] is not None:
            by.setdefault(row["source"], []).append(row.get("implementation") or "others")
    own, *others = by or ["nothing"]
    return "; ".join([own, *(f"{', '.join(dict.fromkeys(by[source]))} by {source}" for source in others)])
