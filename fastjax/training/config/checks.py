"""How a setting of the wrong type, or out of range, is refused."""

import dataclasses
import math
import typing
from collections.abc import Iterator
from typing import Any

from convert.errors import shown
from convert.strict_json import has_surrogate
from fastjax.errors import ConfigError
from fastjax.limits import MAX_INTEGER, MAX_MAGNITUDE
from fastjax.training.config.kinds import describe_kind, fits


def check_section(name: str, section: Any) -> None:
    """Refuse values of another type than the section's annotations, and those that no run can use.

    jsonargparse lets null through, and sections can be made in Python too.

    Args:
        name: of the section.
        section: one of the dataclasses here.

    Raises:
        ConfigError: a value of another type; a number that is not finite or beyond `limits`; a text with a NUL or half
            a character.
    """
    hints = typing.get_type_hints(type(section))
    for field in dataclasses.fields(section):
        key, value, kind = f"{name}.{field.name}", getattr(section, field.name), hints[field.name]
        if not fits(value, kind):
            raise ConfigError(f"{key}: expected {describe_kind(kind)}, got {shown(value, 80)}")
        for part in _scalars(value):
            if isinstance(part, str):
                expect(key, part, "\0" not in part and not has_surrogate(part), "without NUL or half a character")
            elif isinstance(part, int):
                expect(key, part, abs(part) <= MAX_INTEGER, f"of at most {MAX_INTEGER}")
            elif isinstance(part, float):
                expect(key, part, math.isfinite(part), "that is finite")
                expect(key, part, abs(part) <= MAX_MAGNITUDE, f"of at most {MAX_MAGNITUDE:g}")


def expect(name: str, value: Any, holds: bool, expected: str) -> None:
    """Raise ConfigError naming the key unless `holds`."""
    if not holds:
        raise ConfigError(f"{name}: expected a value {expected}, got {shown(value, 80)}")


def expect_interval(name: str, value: Any) -> None:
    """Raise ConfigError unless a value is null, a number of steps, a share of a run's steps below 1, or "epoch"."""
    fits = value is None or isinstance(value, str) or 0 < value < 1 or (value >= 1 and value == int(value))
    expect(name, value, fits, "that is a number of steps from 1, a share of them between 0 and 1, or epoch")


def _scalars(value: Any) -> Iterator[Any]:
    """The keys and values in a setting."""
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, dict):
        value = [part for pair in value.items() for part in pair]
    if isinstance(value, list | tuple):
        for part in value:
            yield from _scalars(part)
    else:
        yield value
