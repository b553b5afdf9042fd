"""`fastjax generate`: let a model, with or without an adapter, answer prompts."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fastjax.commands import compilation_cache
from fastjax.commands.arguments import add_chat_template_kwargs, add_model, load_options
from fastjax.commands.generation import add_generation, generation_options
from fastjax.errors import ConfigError, DataError

if TYPE_CHECKING:
    from fastjax.generation.answers import Answer

T = TypeVar("T")


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Args:
        argv: its arguments.
    """
    arguments = _parser().parse_args(argv)
    prompts, options = _prompts(arguments), generation_options(arguments)
    alone = len(prompts) == options.n == 1
    if arguments.stream and (arguments.json or not alone):
        given = f"{len(prompts)} prompts with {options.n} answers each" if not alone else "--json"
        raise ConfigError(f"--stream: expected one prompt with one answer, printed as text, got {given}")
    from fastjax.generation.prompts import Reading  # JAX is imported once the arguments are right
    from fastjax.generation.text import answers_as_completed, stream
    from fastjax.language_model.as_trained import load_as_trained

    compilation_cache.keep_programs(not arguments.no_compilation_cache)
    model = load_as_trained(arguments.model, arguments.adapter, load_options(arguments))
    reading = Reading(not arguments.raw, arguments.special_tokens, arguments.chat_template_kwargs)
    if arguments.stream or (alone and not arguments.json and sys.stdout.isatty()):
        for text in stream(model, prompts[0], options, reading=reading):
            print(text, end="", flush=True)
        print()
        return
    with _progress(len(prompts) * options.n) as progress:
        completed = answers_as_completed(model, prompts, options, reading=reading, progress=progress)
        for place, found in _in_order(completed):
            _print(prompts[place], found, arguments.json, alone)


def _in_order(completed: Iterable[tuple[int, T]]) -> Iterator[tuple[int, T]]:
    """Sort (number, value) pairs by number, each given as soon as all before it have come."""
    waiting: dict[int, T] = {}
    place = 0
    for number, value in completed:
        waiting[number] = value
        while place in waiting:
            yield place, waiting.pop(place)
            place += 1


def _print(prompt: str, found: "Sequence[Answer]", as_json: bool, alone: bool) -> None:
    """Print the answers of a prompt."""
    for choice, one in enumerate(found):
        if as_json:
            row = {"prompt": prompt, "answer": one.text, "finish_reason": one.finish_reason}
            row |= {"choice": choice} if len(found) > 1 else {}
            print(json.dumps(row, ensure_ascii=False), flush=True)
        elif alone:
            print(one.text, flush=True)
        else:
            print((f"> {prompt}\n" if choice == 0 else "") + f"{one.text}\n", flush=True)


@contextmanager
def _progress(answers: int) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on standard error, if that is a terminal: answers that have ended, and tokens."""
    console = Console(stderr=True)
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("answers, {task.fields[tokens]:,} tokens"),
        TimeElapsedColumn(),
    )
    how = {"disable": not console.is_terminal, "redirect_stdout": sys.stdout.isatty()}  # it would go to stderr too
    with Progress(*columns, console=console, **how) as bar:
        task = bar.add_task("", total=answers, tokens=0)
        yield lambda ended, tokens: bar.update(task, completed=ended, tokens=tokens)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fastjax generate", description="Let a model answer prompts.")
    add_model(parser)
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    parser.add_argument("--file", metavar="FILE", help="prompts, one a line; - is standard input")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is, without a chat template")
    parser.add_argument(
        "--special_tokens",
        choices=("control", "text"),
        default="control",
        help="what special tokens in prompts are read as, as data.special_tokens of training (default: %(default)s)",
    )
    add_chat_template_kwargs(parser)
    add_generation(parser)
    compilation_cache.add_option(parser)
    parser.add_argument(
        "--stream", action="store_true", help="print one prompt's answer as it comes, as on a terminal by itself"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object an answer, with its finish_reason")
    return parser


def _prompts(arguments: argparse.Namespace) -> list[str]:
    from fastjax.data.encoding import check_characters

    prompts = list(arguments.prompt)
    for prompt in prompts:
        try:
            check_characters(prompt, "--prompt")
        except DataError as error:
            raise ConfigError(str(error)) from error
    if arguments.file is not None:
        try:
            text = sys.stdin.read() if arguments.file == "-" else Path(arguments.file).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{arguments.file}: not valid UTF-8 at byte {error.start}") from error
        check_characters(text, "standard input" if arguments.file == "-" else arguments.file)
        # Lines end as in a file of JSON lines: U+2028 and its like may stand in a prompt.
        prompts += [line.removesuffix("\r") for line in text.split("\n") if line.strip()]
    if not prompts:
        raise ConfigError("--prompt: expected at least one prompt, got none; use --prompt TEXT or --file FILE")
    return prompts
