"""Every setting of a run in words: its name, type, default and meaning.

The source is the sections' fields, each with its annotation and a docstring below it: `fastjax train --help` and
docs/settings.md are two renderings of them.
"""

import ast
import dataclasses
import inspect
import itertools
import json
import textwrap
import typing
from typing import NamedTuple

from fastjax.data.settings import DataSource
from fastjax.options import describe, hints_of
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


class Section(NamedTuple):
    """A section of settings.

    Attributes:
        name: its key in the file.
        meaning: a sentence.
        settings: in order.
    """

    name: str
    meaning: str
    settings: list[Setting]


def list_sections() -> list[Section]:
    """All sections, and last those inside of settings: a data set in data.train or data.eval, and training.qat."""
    listed = [_section(name, section) for name, section in SECTIONS.items()]
    source = _section("data.train[…]", DataSource)
    source = source._replace(meaning="One data set, where data.train or data.eval lists sections.")
    return [*listed, source, _section("training.qat", QATSettings)]


def help_text(width: int) -> str:
    """The sections for a terminal.

    Args:
        width: columns.
    """
    lines = []
    for section in list_sections():
        lines += ["", *textwrap.wrap(f"{section.name}: {_lower(section.meaning)}", width)]
        for setting in section.settings:
            default = "required" if setting.default is None else f"default {setting.default}"
            option = f"--{section.name}.{setting.name}" if section.name in SECTIONS else setting.name
            lines += textwrap.wrap(
                f"{option}  {setting.takes}; {default}", width, initial_indent="  ", subsequent_indent="      "
            )
            lines += textwrap.wrap(setting.meaning, width, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines[1:]) + "\n"


def markdown() -> str:
    """The sections as tables."""
    lines = []
    for section in list_sections():
        lines += ["", f"## `{section.name}`", "", section.meaning, ""]
        lines += ["| key | takes | default | meaning |", "| --- | --- | --- | --- |"]
        for setting in section.settings:
            default = "required" if setting.default is None else f"`{setting.default}`"
            cells = (f"`{setting.name}`", setting.takes, default, setting.meaning)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines[1:]) + "\n"


def _section(name: str, section: type) -> Section:
    meanings, hints = _docstrings(section), hints_of(section)
    settings = [
        Setting(field.name, describe(hints[field.name]), _default(field), meanings[field.name])
        for field in dataclasses.fields(section)
    ]
    return Section(name, inspect.cleandoc(section.__doc__ or ""), settings)


def _docstrings(section: type) -> dict[str, str]:
    """The text below each field of a section and of its bases."""
    found = {}
    for kind in section.__mro__[:-1]:
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        assert isinstance(body, ast.ClassDef)
        for field, text in itertools.pairwise(body.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                found[ast.unparse(field.target)] = " ".join(ast.literal_eval(text.value).split())
    return found


def _default(field: dataclasses.Field) -> str | None:
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return None
    return value if isinstance(value, str) else json.dumps(value).replace('"', "")


def _lower(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:].removesuffix(".")
