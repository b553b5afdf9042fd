"""Functions that take the fields of a class of options as keywords, declared and explained there alone."""

import dataclasses
import functools
import inspect
import re
import textwrap
import typing
from collections.abc import Callable, Collection, Mapping
from inspect import Parameter
from typing import Any, TypeVar

from convert.errors import shown
from fastjax.errors import ConfigError
from fastjax.options.other_names import OtherNames
from fastjax.options.words import did_you_mean, meanings

T = TypeVar("T")


def keywords(
    kind: type,
    make: Callable[[dict[str, Any]], Any],
    *,
    positional: Collection[str] = (),
    without: Collection[str] = (),
    defaults: Mapping[str, Any] | None = None,
    beside: OtherNames | None = None,
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Give a function with a parameter `options` the fields of a class of options in its place.

    Args:
        kind: the class.
        make: options from those fields that differ from the class's defaults by being given.
        positional: fields that may stand without their names, in this order, behind the function's own.
        without: fields that it does not take.
        defaults: of fields whose default is another one here.
        beside: keywords of other libraries that it takes too.
    """
    fields = {field.name: field for field in dataclasses.fields(kind) if field.name not in without}
    hints, defaults = typing.get_type_hints(kind), defaults or {}  # without the limits, which the class checks

    def parameter(name: str) -> Parameter:
        how = Parameter.POSITIONAL_OR_KEYWORD if name in positional else Parameter.KEYWORD_ONLY
        return Parameter(name, how, default=defaults.get(name, fields[name].default), annotation=hints[name])

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        others = [one for one in inspect.signature(function).parameters.values() if one.name != "options"]
        before = [one for one in others if one.kind is Parameter.POSITIONAL_OR_KEYWORD]
        named = [parameter(name) for name in fields if name not in positional]
        after = [one for one in others if one.kind is Parameter.KEYWORD_ONLY]
        signature = inspect.Signature([*before, *map(parameter, positional), *named, *after])

        @functools.wraps(function)
        def call(*values: Any, **settings: Any) -> T:
            settings = _translated(function.__name__, settings, beside)
            try:
                given = signature.bind(*values, **settings).arguments
            except TypeError as error:
                unknown = next((name for name in settings if name not in signature.parameters), None)
                names = [*signature.parameters, *(beside.known if beside else ())]
                meant = "" if unknown is None else did_you_mean(unknown, names)
                raise TypeError(f"{function.__name__}: {error}{meant}") from None
            chosen = {**defaults, **{name: given.pop(name) for name in fields if name in given}}
            return function(**given, options=make(chosen))

        listed = "\n".join(
            textwrap.fill(f"{name}: {meaning}", 120, initial_indent=" " * 12, subsequent_indent=" " * 16)
            for name, meaning in meanings(kind).items()
            if name in fields
        )
        call.__doc__ = re.sub(r"^ +options: .*$", lambda _: listed, function.__doc__ or "", count=1, flags=re.M)
        vars(call)["__signature__"] = signature
        return call

    return decorate


def _translated(function: str, settings: dict[str, Any], beside: OtherNames | None) -> dict[str, Any]:
    """Keywords with those of other libraries as the function's own."""
    if beside is None or not (named := beside.known & settings.keys()):
        return settings
    own = {name: value for name, value in settings.items() if name not in named}
    for name, value in beside.translated(function, {name: settings[name] for name in named}).items():
        if own.get(name, value) not in (None, value):
            raise ConfigError(
                f"{function}: {name}: expected {value!r} or none beside {', '.join(sorted(named))}, got "
                f"{shown(own[name], 60)}"
            )
        own[name] = value
    return own
