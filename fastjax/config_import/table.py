"""The table of a tool: its keys, and what becomes of each."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class To(NamedTuple):
    """The setting that a key becomes.

    Attributes:
        setting: section.name.
        default: the tool's own value of it, where the key is absent; None: that of this program serves.
        kind: of the value: any, a "number" that may be written as a text, or "names" with commas.
    """

    setting: str
    default: Any = None
    kind: str = ""


def number(setting: str, default: Any = None) -> To:
    """A number that may be written as a text."""
    return To(setting, default, "number")


def names(setting: str) -> To:
    """A list of names, which may be a text with commas."""
    return To(setting, None, "names")


@dataclasses.dataclass(frozen=True)
class Tool:
    """A tool's settings. A key in the texts that ends in * stands for all keys that begin so.

    Attributes:
        name: as on the command line.
        marks: keys that only its files have.
        groups: functions of a `Job` for keys that belong together; they come first.
        settings: a key that stands for itself → the setting that it becomes.
        not_needed: why a key changes nothing here, whatever its value → such keys.
        not_carried: why a key has no equivalent → such keys.
        refused: why the result would be another → such keys.
        harmless: keys of `not_carried` and `refused` → the values that change nothing; others: those that are off.
        read: the file's content with its references resolved, where the tool has such.
    """

    name: str
    marks: Sequence[str]
    groups: Sequence[Callable[[Any], None]]
    settings: Mapping[str, To]
    not_needed: Mapping[str, str]
    not_carried: Mapping[str, str]
    refused: Mapping[str, str]
    harmless: Mapping[str, Sequence[Any]]
    read: Callable[[Mapping[Any, Any], Path], Mapping[Any, Any]] = lambda content, file: content

    @functools.cached_property
    def reasons(self) -> dict[str, tuple[str, str]]:
        """A key without a setting, or the beginning of several → the list of a `Job` that it goes to, and why."""
        lists = {"not_needed": self.not_needed, "not_carried": self.not_carried, "refused": self.refused}
        return {key: (name, why) for name, keys in lists.items() for why, text in keys.items() for key in text.split()}
