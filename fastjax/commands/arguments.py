"""Types of command-line arguments that several commands share."""

import argparse
from collections.abc import Callable
from typing import Any

from convert.errors import shorten
from fastjax import strict_yaml
from fastjax.strict_yaml import YamlError


def positive(text: str) -> int:
    """A whole number of at least 1.

    Raises:
        argparse.ArgumentTypeError: any other text.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {shorten(text)}")
    return int(text)


def mapping(example: str) -> Callable[[str], dict[str, Any]]:
    """A reader of an argument that is a mapping in YAML.

    Args:
        example: one, for errors.
    """
    expected = f"expected a mapping such as '{example}'"

    def read(text: str) -> dict[str, Any]:
        try:
            value = strict_yaml.parse(text)
        except YamlError as error:
            raise argparse.ArgumentTypeError(f"{expected}, got {shorten(text)}: {error.problem}") from error
        if not isinstance(value, dict):
            raise argparse.ArgumentTypeError(f"{expected}, got {shorten(text)}")
        return value

    return read


def add_chat_template_kwargs(parser: argparse.ArgumentParser) -> None:
    """Add the option `--chat_template_kwargs`.

    Args:
        parser: of a command whose prompts go through the chat template.
    """
    parser.add_argument(
        "--chat_template_kwargs",
        type=mapping("{enable_thinking: false}"),
        metavar="MAPPING",
        help="variables of the chat template, as data.chat_template_kwargs of training: '{enable_thinking: false}'",
    )
