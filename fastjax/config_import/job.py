"""One import: the table of a tool, the keys of its file, and what became of each."""

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from convert.errors import shorten, shown
from fastjax.errors import ConfigError
from fastjax.options import describe, fits, hints_of
from fastjax.training.config import TrainConfig


@dataclasses.dataclass(frozen=True)
class Tool:
    """A tool's settings. Texts list keys.

    Attributes:
        name: as on the command line.
        marks: those that only its files have.
        groups: functions of a `Job` for keys that belong together; they come first.
        settings: tables of a section here → keys that each become a setting of it, written key:name where these differ.
        defaults: such a key → the tool's own value, where it is another than this program's.
        read: the file's content with its references resolved, where the tool has such.
    """

    name: str
    marks: str
    groups: Sequence[Callable[[Any], None]]
    settings: Sequence[Mapping[str, str]]
    defaults: Mapping[str, Any]
    read: Callable[[Mapping[Any, Any], Path], Mapping[Any, Any]] = lambda content, file: content

    @functools.cached_property
    def becomes(self) -> dict[str, str]:
        """A key of `settings` → the setting that it becomes, section.name."""
        rows = [(section, entry) for keys in self.settings for section, text in keys.items() for entry in text.split()]
        return {key: f"{section}.{name or key}" for section, row in rows for key, _, name in [row.partition(":")]}


class Carried(NamedTuple):
    """A key that was carried over, its setting (section.name), and in what that differs, or "": nothing to say."""

    key: str
    setting: str
    value: Any
    note: str


@dataclasses.dataclass
class Job:
    """The state of an import.

    Attributes:
        tool: the tool.
        file: the tool's file, for messages and for files that lie beside it.
        values: its keys with their values; those inside of a mapping also as outer.inner.
        carried: settings, in the order in which they were made.
        not_needed: keys without which the run does the same → why.
        not_carried: keys without an equivalent → why, or what to use instead.
        refused: keys without which the result would be another → why.
        notes: keys that the run needs more for than is known to be here → what.
        taken: keys that a group has read.
    """

    tool: Tool
    file: Path
    values: dict[str, Any]
    carried: dict[str, Carried] = dataclasses.field(default_factory=dict)
    not_needed: dict[str, str] = dataclasses.field(default_factory=dict)
    not_carried: dict[str, str] = dataclasses.field(default_factory=dict)
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    notes: dict[str, str] = dataclasses.field(default_factory=dict)
    taken: set[str] = dataclasses.field(default_factory=set)

    def take(self, key: str, kind: Any = Any) -> Any:
        """The value of a key that the caller accounts for; None: there is none, or null."""
        value = self.values.get(key)
        if value is None:
            return None
        self.taken.add(key)
        return self.checked(key, value, kind)

    def checked(self, key: str, value: Any, kind: Any = dict[str, Any]) -> Any:
        """A value of a type, without a mapping's nulls."""
        if isinstance(value, dict):
            value = {name: item for name, item in value.items() if item is not None}
        if not fits(value, kind):
            raise self.wrong(key, describe(kind), value)
        return value

    def choose(self, key: str, known: Iterable[str], default: str, why: str = "there are {}") -> str:
        """A key's name among those that are known; another is refused, and the default taken."""
        name, known = self.take(key, str) or default, list(known)
        if name in known:
            return name
        self.refused[key] = f"{shorten(name, 80)}: {why.format(', '.join(known))}"
        return default

    def flag(self, key: str, default: bool = False) -> bool:
        """A key's true or false."""
        value = self.take(key, bool)
        return default if value is None else value

    def names(self, key: str) -> list[str]:
        """A key's list of texts, which may be a text with commas; empty: there is none."""
        value = self.take(key)
        listed = [name.strip() for name in value.split(",")] if isinstance(value, str) else value or []
        return self.checked(key, listed, list[str])

    def mapping(self, key: str) -> dict[str, Any]:
        """A key's mapping without its nulls; empty: there is none."""
        return self.checked(key, self.take(key) or {})

    def number(self, key: str, default: float | None = None) -> Any:
        """A key's number; a text of one, as YAML 1.1 reads 2e-5, too."""
        value = self.take(key)
        return default if value is None else self.to_number(key, value)

    def integer(self, key: str, default: int | None = None) -> Any:
        """A key's whole number."""
        value = self.number(key)
        if value is not None and value != int(value):
            raise self.wrong(key, "an integer", value)
        return default if value is None else int(value)

    def to_number(self, key: str, value: Any) -> float:
        """A value as a number."""
        number = value
        if isinstance(value, str) and re.fullmatch(r"[-+]?[0-9.]{1,40}([eE][-+]?[0-9]{1,4})?", value):
            with contextlib.suppress(ValueError):
                number = float(value)
        if isinstance(number, bool) or not isinstance(number, int | float) or not abs(number) < math.inf:
            raise self.wrong(key, "a number", value)
        return number

    def carry(self, key: str, setting: str, value: Any, note: str = "") -> None:
        """Make a setting of a key, or of the tool's default where the file has no such key."""
        if not note and re.fullmatch(r"[\w.]+", key) and self.values.get(key) is None:
            note = f"{self.tool.name}'s default"
        earlier = self.carried.get(setting)
        if earlier is not None and earlier.key in self.values and earlier.key not in key:
            self.not_carried[earlier.key] = f"{key} stands before it"
        self.carried[setting] = Carried(key, setting, value, note)

    def carry_given(self, key: str, setting: str, value: Any, note: str = "") -> None:
        """Make a setting of a key, unless it has no value."""
        if value is not None:
            self.carry(key, setting, value, note)

    def carry_more(self, key: str, setting: str, names: list[str]) -> None:
        """Add to the list of a setting, which other keys may have begun."""
        earlier = self.carried.get(setting)
        if earlier is None:
            self.carry(key, setting, names)
        else:
            more = [name for name in names if name not in earlier.value]
            self.carry(f"{earlier.key}, {key}", setting, [*earlier.value, *more], earlier.note)

    def wrong(self, key: str, expected: str, given: Any) -> ConfigError:
        """The error of a value that the tool itself could not take."""
        where = " ".join(shorten(key, 80).split())
        return ConfigError(f"{self.file}: {where}: expected {expected}, got {shown(given, 80)}")

    @property
    def config(self) -> dict[str, dict[str, Any]]:
        """The settings, by section."""
        sections: dict[str, dict[str, Any]] = {}
        for setting, line in self.carried.items():
            section, _, name = setting.partition(".")
            sections.setdefault(section, {})[name] = line.value
        return sections

    def accounted(self, key: str) -> bool:
        """Whether a key that a group has taken is in one of the lists, by itself or by its parts."""
        lines = (line.key for line in self.carried.values())
        listed = {
            name for keys in (*lines, *self.not_needed, *self.not_carried, *self.refused) for name in keys.split(", ")
        }
        return any(name == key or name.startswith((f"{key}.", f"{key}[", f"{key}:")) for name in listed)


def flat(content: Mapping[Any, Any], outer: str = "") -> Iterator[tuple[str, Any]]:
    """The keys of a file with their values; those inside of a mapping also as outer.inner."""
    for key, value in content.items():
        yield f"{outer}{key}", value
        if isinstance(value, Mapping):
            yield from flat(value, f"{outer}{key}.")


def kind_of(setting: str) -> Any:
    """The annotation of a setting, section.name."""
    section, _, name = setting.partition(".")
    return hints_of(hints_of(TrainConfig)[section])[name]
