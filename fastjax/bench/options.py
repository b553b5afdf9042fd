"""Settings of a benchmark, declared once: a field of a dataclass, with its default and its help, is an option."""

import argparse
import dataclasses
from typing import Any

from fastjax.commands.arguments import positive

#: Types of numbers in which a kernel is measured.
DTYPES = ("bfloat16", "float16", "float32")


def option(default: Any, help: str, **how: Any) -> Any:
    """A field that the command line sets.

    Args:
        default: its value; a tuple for an option with several values, False for a flag.
        help: what `--help` says; the default is added.
        **how: further arguments of argparse's `add_argument`. The type of whole numbers, of which the default is one or
            the metavar N, is `positive` by itself.
    """
    return dataclasses.field(default=default, metadata={"help": help, **how})


def add_options(parser: argparse.ArgumentParser, settings: type) -> None:
    """Add an option for each field of `option`.

    Args:
        parser: of the command.
        settings: the dataclass.
    """
    for field in dataclasses.fields(settings):
        if not field.metadata:
            continue
        how: dict[str, Any] = dict(field.metadata)
        if (default := field.default) is False:
            how["action"] = "store_true"
        else:
            values = default if isinstance(default, tuple) else (default,)
            if (default and all(isinstance(value, int) for value in values)) or how.get("metavar") == "N":
                how = {"type": positive, "metavar": "N"} | how
            if isinstance(default, tuple):
                how = {"nargs": "+"} | how
            shown = " ".join(map(str, values)) if default not in (None, ()) else None
            how["help"] += f" (default: {shown})" if shown else ""
        parser.add_argument(f"--{field.name}", default=default, **how)


def read_options(settings: type, arguments: argparse.Namespace) -> Any:
    """The settings that the command line gives.

    Args:
        settings: the dataclass.
        arguments: parsed by a parser with its options.
    """
    values = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(settings) if field.metadata}
    return settings(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
