"""Types of the command line's arguments that several commands take."""

import argparse
from collections.abc import Callable
from typing import Any

from convert.errors import shorten
from fastjax import strict_yaml
from fastjax.strict_yaml import YamlError


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
