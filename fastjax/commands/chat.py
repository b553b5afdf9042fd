"""`fastjax chat`: talk to a run's result, an adapter or a model, in a terminal or through a pipe."""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from convert.errors import shown
from fastjax.commands import compilation_cache
from fastjax.commands.arguments import add_chat_template_kwargs, add_loading, load_options
from fastjax.commands.generation import add_generation, given_options
from fastjax.errors import ConfigError

if TYPE_CHECKING:
    from fastjax.chat.chat import Chat

LONGEST = 1024
"""Tokens of an answer, at most, where nobody says it."""


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Args:
        argv: its arguments.
    """
    arguments = _parser().parse_args(argv)
    given = given_options(arguments)
    from fastjax.chat.lines import read_messages  # JAX is imported once the arguments are right
    from fastjax.chat.screen import Screen

    compilation_cache.keep_programs(not arguments.no_compilation_cache)
    screen = Screen()
    chat = _chat(arguments, given, screen)
    if screen.asks:
        screen.note("/help lists the commands; Ctrl-D leaves")
    if not chat.run(read_messages(_reader(chat, screen.asks))) and not screen.asks:
        sys.exit(1)


def _chat(arguments: argparse.Namespace, given: dict[str, Any], screen: Any) -> "Chat":
    """Load the model and its adapters."""
    from fastjax.chat.chat import Chat
    from fastjax.chat.subject import find_subject
    from fastjax.chat.voices import BASE, Voices
    from fastjax.execution.opening import open_pretrained
    from fastjax.generation.prompts import Reading
    from fastjax.generation.transformers_settings import settings_of
    from fastjax.language_model.as_trained import as_trained
    from fastjax.language_model.loading import load_pretrained

    subject = find_subject(arguments.model)
    options = load_options(arguments, subject.options)
    with Console(stderr=True).status(f"loading {subject.model}"):
        base = as_trained(load_pretrained(open_pretrained(subject.model, options), options))
        if base.lora is not None:
            raise ConfigError(f"{arguments.model}: expected a base without adapter, got {subject.model}")
        reading = Reading(True, "text", arguments.chat_template_kwargs)
        voices = Voices(base, reading)
        first = BASE if subject.adapter is None else voices.load(subject.adapter).name
        for folder in arguments.adapter:
            first = voices.load(folder).name
    if first not in voices.names:
        raise ConfigError(
            f"{arguments.model}: expected a tokenizer with a chat template, got none; fastjax generate --raw continues "
            "texts"
        )
    answers = dataclasses.replace(settings_of(base, given).options, max_new_tokens=given.get("max_new_tokens", LONGEST))
    return Chat(screen, voices, first, answers, system=arguments.system, seeded=arguments.seed is not None)


def _reader(chat: "Chat", asks: bool) -> Callable[[bool], str | None]:
    """A reader of lines: of a person with history and editing, or of standard input."""
    if asks:
        import readline  # noqa: F401  # input() edits with it

    def read(goes_on: bool) -> str | None:
        while True:
            try:
                if asks:
                    return input("... " if goes_on else chat.prompt)
                line = sys.stdin.readline()
                return line.removesuffix("\n").removesuffix("\r") if line else None
            except EOFError:
                print()
                return None
            except KeyboardInterrupt:
                if not asks:
                    raise
                print()
            except UnicodeDecodeError as error:
                raise ConfigError(f"standard input: expected UTF-8, got {shown(error.object[:20])}") from error

    return read


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fastjax chat",
        description="Talk to a model, in a terminal or through a pipe, where each line is a question. Special tokens "
        "in what is typed are text.",
    )
    parser.add_argument("model", metavar="MODEL", help="folder of a run, an adapter or a model, or a name on the hub")
    parser.add_argument(
        "--adapter", action="append", default=[], metavar="FOLDER", help="another adapter; may be given several times"
    )
    parser.add_argument("--system", default="", metavar="TEXT", help="the system prompt")
    add_loading(parser)
    add_chat_template_kwargs(parser)
    add_generation(parser, defaults=False)
    compilation_cache.add_option(parser)
    return parser
