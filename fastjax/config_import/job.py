"""One import: the keys of another tool's file, and what became of each."""

import contextlib
import dataclasses
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

from convert.errors import shorten, shown
from fastjax.config_import.table import Tool
from fastjax.errors import ConfigError


class Carried(NamedTuple):
    """A key that was carried over.

    Attributes:
        key: in the tool's file.
        setting: here, section.name.
        value: of the setting.
        note: in what it differs, or that it is the tool's default; "": nothing to say.
    """

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
        taken: keys that a group has read.
    """

    tool: Tool
    file: Path
    values: dict[str, Any]
    carried: dict[str, Carried] = dataclasses.field(default_factory=dict)
    not_needed: dict[str, str] = dataclasses.field(default_factory=dict)
    not_carried: dict[str, str] = dataclasses.field(default_factory=dict)
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    taken: set[str] = dataclasses.field(default_factory=set)

    def take(self, key: str) -> Any:
        """The value of a key that the caller accounts for; None: there is none, or null."""
        value = self.values.get(key)
        if value is not None:
            self.taken.add(key)
        return value

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

    def flag(self, key: str, default: bool = False) -> bool:
        """A key's true or false."""
        value = self.take(key)
        if not isinstance(value, bool | None):
            raise self.wrong(key, "true or false", value)
        return default if value is None else value

    def text(self, key: str) -> str | None:
        """A key's text."""
        value = self.take(key)
        if not isinstance(value, str | None):
            raise self.wrong(key, "a string", value)
        return value

    def names(self, key: str) -> list[str]:
        """A key's list of texts, which may be a text with commas; empty: there is none."""
        value = self.take(key)
        if isinstance(value, str):
            value = [name.strip() for name in value.split(",")]
        if value is not None and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
            raise self.wrong(key, "a list of strings", value)
        return value or []

    def mapping(self, key: str) -> dict[str, Any]:
        """A key's mapping without its nulls; empty: there is none."""
        return self.to_mapping(key, self.take(key) or {})

    def listed(self, key: str) -> list[Any]:
        """A key's list; empty: there is none."""
        value = self.take(key)
        if not isinstance(value, list | None):
            raise self.wrong(key, "a list", value)
        return value or []

    def to_number(self, key: str, value: Any) -> float:
        """A value as a number."""
        number = value
        if isinstance(value, str) and re.fullmatch(r"[-+]?[0-9.]{1,40}([eE][-+]?[0-9]{1,4})?", value):
            with contextlib.suppress(ValueError):
                number = float(value)
        if isinstance(number, bool) or not isinstance(number, int | float) or not abs(number) < math.inf:
            raise self.wrong(key, "a number", value)
        return number

    def to_mapping(self, key: str, value: Any) -> dict[str, Any]:
        """A value as a mapping from texts, without its nulls."""
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            raise self.wrong(key, "a mapping from strings", value)
        return {name: item for name, item in value.items() if item is not None}

    def to_texts(self, key: str, value: Any) -> dict[str, str]:
        """A value as a mapping from texts to texts, without its nulls."""
        found = self.to_mapping(key, value)
        if not all(isinstance(item, str) for item in found.values()):
            raise self.wrong(key, "a mapping from strings to strings", value)
        return found

    def carry(self, key: str, setting: str, value: Any, note: str = "") -> None:
        """Make a setting of a key, or of the tool's default where the file has no such key."""
        if not note and re.fullmatch(r"[\w.]+", key) and self.values.get(key) is None:
            note = f"{self.tool.name}'s default"
        earlier = self.carried.get(setting)
        if earlier is not None and earlier.key in self.values and earlier.key not in key:
            self.not_carried[earlier.key] = f"{key} stands before it"
        self.carried[setting] = Carried(key, setting, value, note)

    def wrong(self, key: str, expected: str, given: Any) -> ConfigError:
        """The error of a value that the tool itself could not take."""
        where = " ".join(shorten(key, 80).split())
        return ConfigError(f"{self.file}: {where}: expected {expected}, got {shown(given, 80)}")

    @property
    def config(self) -> dict[str, dict[str, Any]]:
        """The settings, by section."""
        found: dict[str, dict[str, Any]] = {}
        for setting, line in self.carried.items():
            section, _, name = setting.partition(".")
            found.setdefault(section, {})[name] = line.value
        return found

    def accounted(self, key: str) -> bool:
        """Whether a key that a group has taken is in one of the lists, by itself or by its parts."""
        lines = (line.key for line in self.carried.values())
        listed = {
            name for keys in (*lines, *self.not_needed, *self.not_carried, *self.refused) for name in keys.split(", ")
        }
        return any(name == key or name.startswith((f"{key}.", f"{key}[", f"{key}:")) for name in listed)
