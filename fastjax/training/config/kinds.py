"""The type of a setting, from its annotation: in words, and a check of values."""

import types
import typing
from typing import Any, Literal

from fastjax.data.settings import DataSource
from fastjax.training.config.qat import QATSettings

_WORDS: dict[Any, str] = {
    DataSource: "a section with path",
    QATSettings: "a section with weights",
    Any: "anything",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    type(None): "null",
}
_PLURALS: dict[Any, str] = {
    DataSource: "sections with path",
    Any: "values",
    int: "integers",
    float: "numbers",
    str: "strings",
}


def describe_kind(kind: Any) -> str:
    """A type in words.

    Args:
        kind: an annotation of a setting.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(map(str, arguments))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe_kind(argument) for argument in arguments)
    if origin is list:
        return f"a list of {_plural(arguments[0])}"
    if origin is dict:
        return f"a mapping from {_PLURALS[arguments[0]]} to {_plural(arguments[1])}"
    return _WORDS[kind]


def _plural(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return f"some of {', '.join(map(str, typing.get_args(kind)))}"
    if typing.get_origin(kind) is list:
        return f"lists of {_plural(typing.get_args(kind)[0])}"
    return " or ".join(_PLURALS[k] for k in typing.get_args(kind) or (kind,))


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a kind.

    Args:
        value: any.
        kind: an annotation of a setting.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return True
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, argument) for argument in arguments)
    if origin is list:
        return isinstance(value, list | tuple) and all(fits(item, arguments[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            fits(key, arguments[0]) and fits(item, arguments[1]) for key, item in value.items()
        )
    if isinstance(value, bool) and kind is not bool:
        return False
    return isinstance(value, (int, float) if kind is float else kind)
