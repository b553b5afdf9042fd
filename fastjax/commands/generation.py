"""Options of an answer on the command line: the fields of `GenerationOptions`, with their own sentences."""

import argparse
import dataclasses
import typing
from typing import Any

from fastjax.generation.options import GenerationOptions
from fastjax.options.words import meanings

#: Fields that the command line sets.
_NAMES = (
    *("max_new_tokens", "temperature", "top_k", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "n"),
)


def add_generation(parser: argparse.ArgumentParser, *, defaults: bool = True) -> None:
    """Add the options of an answer.

    Args:
        parser: of a command that generates.
        defaults: whether options that are not given have their fields' defaults; else they stay open, and there is one
            answer.
    """
    said, kinds = meanings(GenerationOptions), typing.get_type_hints(GenerationOptions)
    values = {field.name: field.default if defaults else None for field in dataclasses.fields(GenerationOptions)}
    for name in _NAMES if defaults else _NAMES[:-1]:
        number = float if float in (kinds[name], *typing.get_args(kinds[name])) else int
        shown = "" if values[name] is None else f" (default: {values[name]})"
        meaning = said[name].removesuffix(".").replace("%", "%%")
        parser.add_argument(
            f"--{name}",
            type=number,
            default=values[name],
            metavar="N" if number is int else "X",
            help=meaning + shown,
        )
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="text that ends the answer before it; may be given several times ($'\\n' is a new line in most shells)",
    )


def generation_options(arguments: argparse.Namespace) -> GenerationOptions:
    """The options of an answer that are among a command's arguments.

    Args:
        arguments: with those of `add_generation`.

    Raises:
        ConfigError: names one that is out of its range.
    """
    given = {name: getattr(arguments, name) for name in _NAMES}
    return GenerationOptions(**given, stop_strings=tuple(arguments.stop))


def given_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of an answer that were given, by name.

    Args:
        arguments: with those of `add_generation` without defaults.

    Raises:
        ConfigError: names one that is out of its range.
    """
    given = {name: getattr(arguments, name) for name in _NAMES[:-1] if getattr(arguments, name) is not None}
    given |= {"stop_strings": tuple(arguments.stop)} if arguments.stop else {}
    GenerationOptions(**given)
    return given
