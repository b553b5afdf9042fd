"""Every setting of a run in words: its name, type, default and meaning.

The source is the sections' fields, each with its annotation and a docstring below it: `fastjax train --help` and
docs/settings.md are two renderings of them.
"""

import dataclasses
import json
import textwrap
import typing
from collections.abc import Iterator
from typing import NamedTuple

from fastjax.data.settings import DataSource
from fastjax.options import describe, hints_of, meanings
from fastjax.training.config import QATSettings, TrainConfig

SECTIONS: dict[str, type] = typing.get_type_hints(TrainConfig)
"""The sections of the file, in order, with their dataclasses."""


class Setting(NamedTuple):
    """One setting.

    Attributes:
        name: its key in the section.
        takes: its type in words.
        default: in YAML; None: the setting is required.
        meaning: a sentence or more.
    """

    name: str
    takes: str
    default: str | None
    meaning: str


def list_sections() -> Iterator[tuple[str, str, list[Setting]]]:
    """The sections, each with its meaning and its settings; last those inside of data.train and training.qat."""
    inside = {"data.train[…]": DataSource, "training.qat": QATSettings}
    for name, section in {**SECTIONS, **inside}.items():
        sentences, hints = meanings(section), hints_of(section)
        settings = [
            Setting(field.name, describe(hints[field.name]), _default(field), sentences[field.name])
            for field in dataclasses.fields(section)
        ]
        yield name, section.__doc__ or "", settings


def help_text(width: int) -> str:
    """The sections for a terminal.

    Args:
        width: columns.
    """
    lines = []
    for name, meaning, settings in list_sections():
        lines += ["", *textwrap.wrap(f"{name}: {meaning[:1].lower()}{meaning[1:].removesuffix('.')}", width)]
        for setting in settings:
            default = "required" if setting.default is None else f"default {setting.default}"
            option = f"--{name}.{setting.name}" if name in SECTIONS else setting.name
            lines += textwrap.wrap(
                f"{option}  {setting.takes}; {default}", width, initial_indent="  ", subsequent_indent="      "
            )
            lines += textwrap.wrap(setting.meaning, width, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines[1:]) + "\n"


def markdown() -> str:
    """The sections as tables."""
    lines = []
    for name, meaning, settings in list_sections():
        lines += ["", f"## `{name}`", "", meaning, ""]
        lines += ["| key | takes | default | meaning |", "| --- | --- | --- | --- |"]
        for setting in settings:
            default = "required" if setting.default is None else f"`{setting.default}`"
            cells = (f"`{setting.name}`", setting.takes, default, setting.meaning)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines[1:]) + "\n"


def _default(field: dataclasses.Field) -> str | None:
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return None
    return value if isinstance(value, str) else json.dumps(value).replace('"', "")
