"""The type of a setting in words, from its annotation: for errors, `--help` and docs/settings.md."""

import ast
import dataclasses
import difflib
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from annotated_types import Interval

#: Type → its name alone and in lists.
_WORDS: dict[Any, tuple[str, str]] = {
    Any: ("anything", "values"),
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    bool: ("true or false", "true or false"),
    str: ("a string", "strings"),
    list: ("a list", "lists"),
    type(None): ("null", "null"),
}


def describe(kind: Any, many: bool = False) -> str:
    """A type in words.

    Args:
        kind: an annotation of a setting; a text among its metadata is its description.
        many: in the plural, for the items of a list.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        said = next((text for text in arguments if isinstance(text, str)), None)
        return said or describe(arguments[0], many) + _range(arguments[1:])
    if origin is Literal:
        return ("some of " if many else "one of " if len(arguments) > 1 else "") + ", ".join(map(str, arguments))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(argument, many) for argument in arguments)
    if origin is list:
        return f"{'lists' if many else 'a list'} of {describe(arguments[0], True)}"
    if origin is dict:
        return f"a mapping from {describe(arguments[0], True)} to {describe(arguments[1], True)}"
    if dataclasses.is_dataclass(kind):
        return f"{'sections' if many else 'a section'} with {', '.join(required(kind))}"
    return _WORDS[kind][many]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A clause with the known name that an unknown one most likely stands for; "": there is none.

    Args:
        name: as it was given.
        known: the names.
    """
    close = difflib.get_close_matches(name[:80], list(known), n=1, cutoff=0.75)
    return f"; did you mean {close[0]}?" if close else ""


def meanings(section: type) -> dict[str, str]:
    """The text below each field of a section and of its bases.

    Args:
        section: a dataclass.
    """
    found: dict[str, str] = {}
    for kind in reversed(section.__mro__[:-1]):
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        assert isinstance(body, ast.ClassDef)
        for field, text in itertools.pairwise(body.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                found[ast.unparse(field.target)] = " ".join(ast.literal_eval(text.value).split())
    return found


def required(section: Any) -> list[str]:
    """The keys that a section needs.

    Args:
        section: a dataclass.
    """
    return [f.name for f in dataclasses.fields(section) if f.default is f.default_factory is dataclasses.MISSING]


def nested(kind: Any) -> list[Any]:
    """The sections inside of a type.

    Args:
        kind: an annotation of a setting.
    """
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return [kind]
    return [section for argument in typing.get_args(kind) for section in nested(argument)]


def _range(metadata: tuple[Any, ...]) -> str:
    """The bounds of an `Interval` among an annotation's metadata; "": there is none."""
    for bounds in metadata:
        if not isinstance(bounds, Interval):
            continue
        low = bounds.gt if bounds.ge is None else bounds.ge
        high = bounds.lt if bounds.le is None else bounds.le
        if high is None:
            return f" greater than {low}" if bounds.ge is None else f" of at least {low}"
        if low is None:
            return f" less than {high}" if bounds.le is None else f" of at most {high}"
        if bounds.ge is not None and bounds.le is not None:
            return f" from {low} to {high}"
        return f" in {'(' if bounds.ge is None else '['}{low}, {high}{')' if bounds.le is None else ']'}"
    return ""
