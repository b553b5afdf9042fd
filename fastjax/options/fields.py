"""Classes of options: frozen dataclasses whose fields pydantic checks, with one sentence for a mistake.

A field's annotation is the one declaration of its type and range (`annotated_types.Interval`); a text among its
metadata replaces the description made of these. Rules between fields stand in `__post_init__`.
"""

import dataclasses
import functools
import math
import typing
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, dataclass_transform

import pydantic
from pydantic import ConfigDict, TypeAdapter, ValidationError

from convert.errors import shorten, shown
from convert.strict_json import has_surrogate
from fastjax.errors import ConfigError
from fastjax.limits import MAX_INTEGER, MAX_MAGNITUDE
from fastjax.options.words import describe, nested

S = TypeVar("S")

_STRICT = ConfigDict(strict=True, extra="forbid")


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def checked(name: str) -> Callable[[type[S]], type[S]]:
    """Make a class a frozen dataclass that raises ConfigError for a value that does not fit its field.

    Fields that are such classes themselves, or lists of them, take mappings too.

    Args:
        name: that errors begin with, such as that of a section in the file; "": errors begin with the field.
    """

    def make(kind: type[S]) -> type[S]:
        made: Any = pydantic.dataclasses.dataclass(frozen=True, config=_STRICT)(kind)
        construct, names = made.__init__, [field.name for field in dataclasses.fields(made)]

        @functools.wraps(construct)
        def init(self: Any, *values: Any, **settings: Any) -> None:
            given = dict(zip(names, values, strict=False)) | settings
            hints, settings = hints_of(made), {}
            for key, value in given.items():
                where = full_name(self, shorten(key, 80))
                _check_limits(where, value)
                settings[key] = value = list(value) if isinstance(value, tuple) else value
                for inner in nested(hints.get(key)):
                    settings[key] = _with_sections(value, inner, where)
            try:
                construct(self, *values[len(names) :], **settings)
            except ValidationError as error:
                raise ConfigError(_explain(self, hints, given, error)) from error

        made.__init__ = init
        made.__option__ = name
        return made

    return make


def full_name(options: Any, field: str) -> str:
    """The name of a field in errors: section.field.

    Args:
        options: of a class that is `checked`.
        field: its field.
    """
    return f"{options.__option__}.{field}" if options.__option__ else field


@functools.cache
def hints_of(section: type) -> dict[str, Any]:
    """The annotations of a section's fields, with their metadata.

    Args:
        section: the class.
    """
    return typing.get_type_hints(section, include_extras=True)


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a type.

    Args:
        value: any.
        kind: an annotation of a setting.
    """
    try:
        TypeAdapter(kind, config=_STRICT).validate_python(value)
    except ValidationError:
        return False
    return True


def _with_sections(value: Any, inner: Any, where: str) -> Any:
    """A value with its mappings, or those of its list, as sections."""
    if isinstance(value, list):
        return [
            _with_sections(item, inner, f"{where}[{index}]") if isinstance(item, dict) else item
            for index, item in enumerate(value)
        ]
    if not isinstance(value, dict):
        return value
    try:
        return inner(**{str(key): item for key, item in value.items()})
    except ConfigError as error:
        raise ConfigError(where + str(error).removeprefix(inner.__option__)) from error


def _explain(options: Any, hints: dict[str, Any], settings: dict[str, Any], error: ValidationError) -> str:
    """A mistake in a sentence: an unknown key if there is one, else the first."""
    mistakes = error.errors(include_url=False, include_input=False)
    mistake = max(mistakes, key=lambda one: one["type"] == "unexpected_keyword_argument")
    if not mistake["loc"]:  # a rule between fields, of `__post_init__`
        return str(mistake.get("ctx", {})["error"])
    key = str(mistake["loc"][0])
    where = full_name(options, shorten(key, 80))
    if key not in hints:
        return f"{where}: unknown; expected one of {', '.join(hints)}"
    if key not in settings:
        return f"{where}: expected a value, got none"
    return f"{where}: expected {describe(hints[key])}, got {shown(settings[key], 80)}"


def _check_limits(where: str, value: Any) -> None:
    """Refuse half a character, infinity, and numbers beyond `limits`."""
    for part in _scalars(value):
        expected = None
        if isinstance(part, str) and ("\0" in part or has_surrogate(part)):
            expected = "without NUL or half a character"
        elif isinstance(part, int) and abs(part) > MAX_INTEGER:
            expected = f"of at most {MAX_INTEGER}"
        elif isinstance(part, float) and not abs(part) <= MAX_MAGNITUDE:
            expected = f"of at most {MAX_MAGNITUDE:g}" if math.isfinite(part) else "that is finite"
        if expected is not None:
            raise ConfigError(f"{where}: expected a value {expected}, got {shown(part, 80)}")


def _scalars(value: Any) -> Iterator[Any]:
    """The keys and values in a setting."""
    if isinstance(value, dict):
        value = [part for pair in value.items() for part in pair]
    if isinstance(value, list | tuple):
        for part in value:
            yield from _scalars(part)
    else:
        yield value
