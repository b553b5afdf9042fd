"""Results of measurements, as a table and as a JSON file."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich import box
from rich.console import Console
from rich.table import Table


def make_table(title: str, words: Sequence[str], numbers: Sequence[str], caption: str | None = None) -> Table:
    """A table without rows, close enough that eight or nine columns fit into a line of 80.

    Args:
        title: above it.
        words: names of the first columns.
        numbers: names of those that follow, aligned to the right.
        caption: below it.
    """
    table = Table(
        title=title,
        caption=caption,
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=0,
        title_justify="left",
        caption_justify="left",
    )
    for name in words:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def show(console: Console, table: Table, reasons: Sequence[tuple[str, str]] = ()) -> None:
    """Print a table and, below it, why something is missing in it: each reason once.

    Args:
        console: where to.
        table: by `make_table`.
        reasons: (missing entry, reason).
    """
    console.print(table)
    for missing, reason in dict.fromkeys(reasons):
        console.print(f"{missing}: {reason}", highlight=False, markup=False)


def save(output: Path | None, results: Sequence[Any], console: Console, **about: Any) -> None:
    """Write results, with the device and JAX's version, and say so.

    Args:
        output: the file; None: none is written.
        results: lines of the table, dataclasses.
        console: for the message.
        **about: further entries of the file.
    """
    if output is None:
        return
    facts = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, **about}
    facts["results"] = [dataclasses.asdict(line) for line in results]
    output.write_text(json.dumps(facts, indent=1, default=str) + "\n", encoding="utf-8")
    console.print(f"written to {output}", highlight=False)
