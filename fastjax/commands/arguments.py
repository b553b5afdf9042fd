"""Types of command-line arguments that several commands share."""

import argparse
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from convert.errors import shorten
from fastjax import strict_yaml
from fastjax.strict_yaml import YamlError

if TYPE_CHECKING:
    from fastjax.execution.options import LoadOptions


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


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the options of a model that computes, with those of loading it.

    Args:
        parser: of a command that takes a model, with or without an adapter.
    """
    parser.add_argument("--model", required=True, metavar="MODEL", help="folder, or name on the hub (NAME@REVISION)")
    parser.add_argument("--adapter", metavar="ADAPTER", help="PEFT adapter for it, a folder or a name on the hub")
    add_loading(parser)


def add_loading(parser: argparse.ArgumentParser) -> None:
    """Add the options of loading a model.

    Args:
        parser: of a command that takes a model.
    """
    parser.add_argument("--max_seq_length", type=int, metavar="N", help="default: 2048, or what the model can do")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="default: by the device")
    parser.add_argument("--load_in_4bit", action="store_true", help="hold the layers' weights in NF4")
    parser.add_argument(
        "--rope_scaling",
        type=mapping("{rope_type: yarn, factor: 4.0}"),
        metavar="MAPPING",
        help="as model.rope_scaling of the run that made the adapter: '{rope_type: yarn, factor: 4.0}'",
    )
    parser.add_argument("--allow_nonfinite", action="store_true", help="let NaN and infinity in the weights through")


def load_options(arguments: argparse.Namespace, known: Mapping[str, Any] | None = None) -> "LoadOptions":
    """The options of loading that are among a command's arguments.

    Args:
        arguments: with those of `add_loading`.
        known: options that count where the arguments leave them open.
    """
    from fastjax.execution.options import LoadOptions  # --help needs none

    loading = argparse.ArgumentParser()
    add_loading(loading)  # of a command's own arguments another may have the name of an option of loading
    given = {name: getattr(arguments, name) for name in vars(loading.parse_args([]))}
    stated = {name: value for name, value in given.items() if value is not None and value is not False}
    return LoadOptions(**{**given, **(known or {}), **stated})


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
