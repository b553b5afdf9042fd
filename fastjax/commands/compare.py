"""`fastjax compare`: several runs in one page, and their figures on the screen. It needs no GPU."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from convert.files import atomic_file
from fastjax.errors import ConfigError

if TYPE_CHECKING:
    from fastjax.training.report.comparison import ComparedRun


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Args:
        argv: its arguments.
    """
    arguments = _parser().parse_args(argv)
    if arguments.output.is_dir():
        raise ConfigError(f"--output: expected a file, got the folder {arguments.output}")
    from fastjax.runs.reading import read_runs  # JAX is imported once the arguments are right
    from fastjax.training.report.comparison import comparison_page, differing_settings

    runs = read_runs(arguments.runs)
    page = comparison_page(runs)
    with atomic_file(arguments.output) as file:
        file.write(page.encode())
    console = Console()
    console.print(_table(runs))
    differences = differing_settings(runs)
    if differences:
        names = ", ".join(differences)
        console.print(f"settings that differ: {names}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"comparison: {arguments.output}", highlight=False, markup=False, soft_wrap=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fastjax compare",
        description="Overlay the curves of several runs in one page, with their figures side by side and the settings "
        "in which they differ. Runs may be at work, stopped or finished.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="output folder of a run")
    parser.add_argument(
        "--output", type=Path, default=Path("compare.html"), metavar="FILE", help="the page (default: %(default)s)"
    )
    return parser


def _table(runs: "Sequence[ComparedRun]") -> Table:
    """The figures, a column for each run."""
    from fastjax.training.report.comparison import figures

    table = Table("", box=None, header_style="bold", pad_edge=False)
    for run in runs:
        table.add_column(Text(run.name), justify="right")
    for label, facts in figures(runs).items():
        table.add_row(label, *("–" if fact is None else fact.value for fact in facts))
    return table
