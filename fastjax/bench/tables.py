"""Measurements as tables of cases: timed by turns, compared, printed and written as JSON in one way."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from rich import box
from rich.console import Console
from rich.table import Table

from fastjax.bench.timing import Case, Row, measure
from pallas_kernels import dispatch

#: The name in the rows of a column's number, and Python's form for it.
Number = tuple[str, str]
Beside = tuple[Callable[[Row], Mapping[str, Any] | None], Callable[[Row, Row], float]]


class Bench(NamedTuple):
    """A benchmark.

    Attributes:
        description: what `--help` says.
        settings: a dataclass of options, with `rounds`; the defaults suit a GPU.
        tables: of the settings, one after the other: title and cases.
        words: name of a column → that of the rows.
        numbers: columns that follow the time, aligned to the right.
        beside: name of a figure beside another row, of its table or of one before → the labels which that one has, of
            the row (None: there is none), and the figure, of both.
    """

    description: str
    settings: type
    tables: Callable[[Any], Iterator[tuple[str, list[Case]]]]
    words: Mapping[str, str]
    numbers: Mapping[str, Number]
    beside: Mapping[str, Beside] = MappingProxyType({})


def run(bench: Bench, settings: Any, output: Path | None = None, console: Console | None = None) -> list[Row]:
    """Measure; show each table as soon as it is known; write a file.

    Args:
        bench: the benchmark.
        settings: an instance of its dataclass.
        output: JSON file for the settings, the device and the rows; None: no file.
        console: for the tables; None: standard output.

    Returns:
        The rows of all tables.

    Raises:
        ConfigError: settings that do not fit.
        OSError: a file that cannot be read or written.
    """
    console, results = console or Console(), []
    times = {"µs": ("microseconds", ",.1f"), "best": ("best", ",.1f"), "worst": ("worst", ",.1f")}
    for title, cases in bench.tables(settings):
        rows = measure(cases, settings.rounds)
        results += rows
        for row in rows:
            row.update({name: _beside(row, beside, results) for name, beside in bench.beside.items()})
        title = f"{title} · {dispatch.target()} · jax {jax.__version__}"
        caption = f"median of {settings.rounds}, time by {_sources(rows)}"
        print_rows(console, title, rows, bench.words, times | dict(bench.numbers), caption)
        del cases  # their arrays make room for the next table's
    if output is not None:
        facts = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "case": dataclasses.asdict(settings)}
        output.write_text(json.dumps({**facts, "results": results}, indent=1, default=str) + "\n", encoding="utf-8")
        console.print(f"written to {output}", highlight=False)
    return results


def _beside(row: Row, beside: Beside, rows: Iterable[Row]) -> float | None:
    labels_of, figure = beside
    labels = labels_of(row) if row["reason"] is None else None
    if labels is None:
        return None
    fitting = (other for other in rows if other["reason"] is None and labels.items() <= other.items())
    other = next(fitting, None)
    return None if other is None else figure(row, other)


def _cell(row: Row, name: str, form: str = "") -> str:
    return "" if row[name] is None else format(row[name], form)


def print_rows(
    console: Console,
    title: str,
    rows: Sequence[Row],
    words: Mapping[str, str],
    numbers: Mapping[str, Number],
    caption: str | None = None,
) -> None:
    """Print a table and, below it, why rows have no figure: each reason once.

    Its columns are close enough that eight or nine fit into a line of 80.

    Args:
        console: where to.
        title: above it.
        rows: its rows; the `reason` of one without figures is below the table.
        words: name of a column → that of the rows.
        numbers: columns that follow, aligned to the right.
        caption: below the table.
    """
    shape: dict[str, Any] = {"box": box.SIMPLE_HEAD, "pad_edge": False, "padding": 0}
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left", **shape)
    for name in (*words, *numbers):
        table.add_column(name, justify="left" if name in words else "right", no_wrap=True)
    missing: dict[tuple[str, str], None] = {}
    for row in rows:
        names = [_cell(row, name) for name in words.values()]
        if row["reason"] is None:
            table.add_row(*names, *(_cell(row, *column) for column in numbers.values()))
        else:
            missing[" ".join(filter(None, names)), row["reason"]] = None
    if table.row_count:
        console.print(table)
    else:
        console.print(title, highlight=False, markup=False)
    for names, reason in missing:
        console.print(f"{names}: {reason}", highlight=False, markup=False)


def _sources(rows: Sequence[Row]) -> str:
    """The methods of timing, the first one's of all rows but those that are named with another."""
    by: dict[str, list[str]] = {}
    for row in rows:
        if row["source"] is not None:
            by.setdefault(row["source"], []).append(row.get("implementation") or "others")
    own, *others = by or ["nothing"]
    return "; ".join([own, *(f"{', '.join(dict.fromkeys(by[source]))} by {source}" for source in others)])
