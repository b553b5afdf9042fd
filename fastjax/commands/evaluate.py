"""`fastjax evaluate`: let a model, with or without an adapter, do the tasks of a YAML file."""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import MofNCompleteColumn, Progress
from rich.table import Table
from rich.text import Text

from convert.files import atomic_file
from fastjax.commands import compilation_cache
from fastjax.commands.arguments import add_chat_template_kwargs, add_model, load_options
from fastjax.errors import ConfigError

if TYPE_CHECKING:
    from fastjax.evaluation import Result


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Args:
        argv: its arguments.
    """
    arguments = _parser().parse_args(argv)
    if arguments.batch_size < 1:
        raise ConfigError(f"--batch_size: expected at least 1, got {arguments.batch_size}")
    if arguments.output is not None and arguments.output.is_dir():
        raise ConfigError(f"--output: expected a file, got the folder {arguments.output}")
    from fastjax.evaluation.tasks import read_tasks

    tasks = read_tasks(arguments.tasks)
    if arguments.limit is not None:
        tasks = [dataclasses.replace(task, limit=arguments.limit) for task in tasks]
    from fastjax.evaluation import evaluate  # JAX is imported once the arguments are right
    from fastjax.language_model.as_trained import load_as_trained

    compilation_cache.keep_programs(not arguments.no_compilation_cache)
    model = load_as_trained(arguments.model, arguments.adapter, load_options(arguments))
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=Console(stderr=True)) as bar:
        bars = {task.name: bar.add_task(escape(task.name), total=None) for task in tasks}

        def progress(task: str, done: int, rows: int) -> None:
            bar.update(bars[task], completed=done, total=rows)

        variables = arguments.chat_template_kwargs
        how = {"batch_size": arguments.batch_size, "chat_template_kwargs": variables, "progress": progress}
        results = evaluate(model, tasks, **how)
    if arguments.output is not None:
        said = {"model": arguments.model, "adapter": arguments.adapter, "tasks": [one._asdict() for one in results]}
        with atomic_file(arguments.output) as file:
            file.write(json.dumps(said, ensure_ascii=False, indent=1).encode())
    Console().print(_table(results))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fastjax evaluate",
        description="Let a model do tasks: questions whose answers must match, or choices, of which the likeliest "
        "counts.",
    )
    add_model(parser)
    parser.add_argument("--tasks", required=True, type=Path, metavar="FILE", help="YAML file with a list of tasks")
    add_chat_template_kwargs(parser)
    parser.add_argument("--limit", type=int, metavar="N", help="the first rows of each task alone")
    parser.add_argument(
        "--batch_size", type=int, default=32, metavar="N", help="rows of packed choices at once (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write metrics and samples as JSON")
    compilation_cache.add_option(parser)
    return parser


def _table(results: "Sequence[Result]") -> Table:
    table = Table("task", "metric", "rows", "value")
    for result in results:
        for name, value in result.metrics.items():
            if name.endswith("_stderr"):
                continue
            error = result.metrics.get(f"{name}_stderr")
            shown = f"{value:.4f}" + ("" if error is None else f" ± {error:.4f}")
            table.add_row(Text(result.task), name, f"{result.rows:,}", shown)
    return table
