"""One import: the keys of another tool's file, and what became of each."""

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from convert.errors import shorten, shown
from fastjax.errors import ConfigError

#: Settings that need held-out data.
_OF_EVALUATION = (
    "training.eval_steps",
    "training.per_device_eval_batch_size",
    "training.early_stopping_patience",
    "training.early_stopping_threshold",
    "output.load_best_model_at_end",
)


@dataclasses.dataclass(frozen=True)
class Row:
    """A key's entry.

    Attributes:
        apply: accounts for the key in a job, given its name and value.
        setting: the setting that it becomes; "": none.
        default: the tool's own value of that setting, where the key is absent; None: that of this program serves.
    """

    apply: "Callable[[Job, str, Any], None]"
    setting: str = ""
    default: Any = None


class Tool(NamedTuple):
    """A tool's settings.

    Attributes:
        name: as on the command line.
        marks: keys that only its files have; one with a dot stands inside another.
        rows: its keys that are carried over alone → what becomes of them. A name that ends in * stands for all keys
            that begin so.
        groups: functions for keys that belong together; they come first.
        read: the file's content with its references resolved, where the tool has such.
    """

    name: str
    marks: tuple[str, ...]
    rows: Mapping[str, Row]
    groups: "tuple[Callable[[Job], None], ...]"
    read: Callable[[Mapping[Any, Any], Path], Mapping[Any, Any]] = lambda content, file: content


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

    def number(self, key: str) -> float | None:
        """A key's number; a text of one, as YAML 1.1 reads 2e-5, too."""
        value = self.take(key)
        return None if value is None else self.to_number(key, value)

    def integer(self, key: str) -> int | None:
        """A key's whole number."""
        value = self.number(key)
        if value is not None and value != int(value):
            raise self.wrong(key, "an integer", value)
        return None if value is None else int(value)

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

    def names(self, key: str) -> list[str] | None:
        """A key's list of texts, which may be a text with commas."""
        value = self.take(key)
        if isinstance(value, str):
            value = [name.strip() for name in value.split(",")]
        if value is not None and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
            raise self.wrong(key, "a list of strings", value)
        return value

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


def import_settings(tool: Tool, content: Mapping[Any, Any], file: Path) -> Job:
    """Carry a tool's settings over.

    Args:
        tool: the tool.
        content: its file, parsed.
        file: the file's name.

    Returns:
        What became of each key.

    Raises:
        ConfigError: keys that change the result and have no equivalent, or values that the tool itself could not take.
    """
    content = tool.read(content, file)
    job = Job(tool, file, dict(_flat(content)))
    for group in tool.groups:
        group(job)
    for key, row in tool.rows.items():
        if row.default is not None and job.values.get(key) is None and row.setting not in job.carried:
            job.carry(key, row.setting, row.default)
    for key, value in content.items():
        _pass(job, str(key), value)
    _reconcile(job)
    if job.refused:
        reasons = "; ".join(f"{shorten(key, 80)}: {reason}" for key, reason in job.refused.items())
        raise ConfigError(f"{file}: cannot be carried over: {' '.join(reasons.split())}")
    return job


def _flat(content: Mapping[Any, Any], outer: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        yield f"{outer}{key}", value
        if isinstance(value, Mapping):
            yield from _flat(value, f"{outer}{key}.")


def _pass(job: Job, key: str, value: Any) -> None:
    """Account for a key that no group has taken, or that one has taken and found empty."""
    if key in job.taken:
        empty = not value or (isinstance(value, Mapping) and not any(item is not None for item in value.values()))
        if empty and key not in (*job.not_needed, *job.not_carried, *(line.key for line in job.carried.values())):
            job.not_needed[key] = "empty"
        return
    row = job.tool.rows.get(key) or next(
        (row for name, row in job.tool.rows.items() if name.endswith("*") and key.startswith(name[:-1])), None
    )
    inside = any(name.startswith(f"{key}.") for name in (*job.tool.rows, *job.taken))
    if isinstance(value, Mapping) and value and row is None and inside:
        for name, item in value.items():
            _pass(job, f"{key}.{name}", item)
    elif value is None:
        if key not in (line.key for line in job.carried.values()):
            job.not_needed[key] = "null: the default"
    elif row is None:
        job.not_carried[key] = f"unknown to this import; no setting of {job.tool.name} that it knows"
    else:
        row.apply(job, key, value)


def _reconcile(job: Job) -> None:
    """Drop settings that stand in no run of this kind: of an adapter, or of an evaluation, that there is not."""
    full = job.carried.get("model.full_finetuning")
    dropped = {}
    if full is not None and full.value:
        dropped = {name: "every weight is trained, there is no adapter" for name in job.carried if name[:5] == "lora."}
    elif "lora.adapter" in job.carried:
        kept = ("lora.adapter", "lora.lora_dropout")
        others = [name for name in job.carried if name[:5] == "lora." and name not in kept]
        dropped = dict.fromkeys(others, "the adapter to start from brings its own")
    for setting, reason in dropped.items():
        line = job.carried.pop(setting)
        if line.key in job.values:
            job.not_needed[line.key] = reason
    streamed = "data.train" in job.carried and any(
        isinstance(source, dict) and source.get("streaming") for source in job.carried["data.train"].value
    )
    packed = "data.packing" not in job.carried or job.carried["data.packing"].value
    if (packed or streamed) and (line := job.carried.pop("training.group_by_length", None)) is not None:
        job.not_needed[line.key] = "packed rows waste no slots" if packed else "streamed rows come in their order"
    for setting in ("training.eval_steps", "output.save_steps"):
        if streamed and setting in job.carried and job.carried[setting].value == "epoch":
            line = job.carried.pop(setting)
            if line.key in job.values:
                job.not_carried[line.key] = f"the end of an epoch is not known of streamed data; {setting} takes steps"
    if not {"data.eval", "data.val_set_size"} & set(job.carried):
        for setting in _OF_EVALUATION:
            if (line := job.carried.pop(setting, None)) is not None and line.key in job.values:
                job.not_carried[line.key] = f"{setting} needs data.eval or data.val_set_size, and there is neither"
