"""A YAML file and overrides from the command line, as a TrainConfig.

jsonargparse reads both against the dataclasses, refuses unknown keys and converts types. Its errors are put into one
sentence that names the file (or the option), the key, what was expected and what was given.
"""

import argparse
import dataclasses
import difflib
import re
import shutil
import textwrap
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ActionConfigFile, ArgumentParser  # pyright: ignore[reportPrivateImportUsage]

from fastjax.commands.reference import SECTIONS, describe_kind, help_text
from fastjax.data.settings import DataSource
from fastjax.errors import ConfigError
from fastjax.training.config import TrainConfig

_USAGE = "fastjax train --config FILE [--section.key value ...] [--resume]"

#: Options that are no settings, with what they do.
_OPTIONS = {
    "--config FILE": "the YAML file",
    "--resume": "go on from the newest whole checkpoint in output.output_dir; from the start where there is none; "
    "a finished run is left as it is",
    "--print_config": "print all settings as they would be used, as a YAML file, and exit",
    "--help": "show this and exit",
}


def parse_train_config(argv: Sequence[str]) -> TrainConfig:
    """Read the settings of a run.

    Args:
        argv: `--config FILE` and any `--section.key value`; the latter win. `--resume` is no setting and is left out.

    Returns:
        The settings.

    Raises:
        ConfigError: no file, one that is not YAML, an unknown key, a wrong type, a value out of range.
        SystemExit: `--help` or `--print_config` was asked for and has been printed.
    """
    finder = argparse.ArgumentParser(prog="fastjax train", usage=_USAGE, add_help=False, allow_abbrev=False)
    finder.add_argument("--config")
    finder.add_argument("--resume", action="store_true")
    found, argv = finder.parse_known_args(argv)
    file = found.config
    content = _read(file) if file is not None else {}
    parser = _parser()
    try:
        sections = parser.instantiate(parser.parse_args([*([f"--config={file}"] if file is not None else []), *argv]))
        return TrainConfig(**{name: sections[name] for name in SECTIONS})
    except ConfigError as error:  # out of range: the message begins with the key
        key = str(error).partition(":")[0]
        raise ConfigError(f"{_place(key, argv, file)}{error}") from error
    except argparse.ArgumentError as error:
        raise ConfigError(_explain(str(error), argv, file, content)) from error


class _Parser(ArgumentParser):
    """jsonargparse's parser with a help of our own: its lists type annotations instead of saying what is expected."""

    def format_help(self) -> str:
        width = max(50, min(shutil.get_terminal_size().columns, 120) - 2)
        introduction = textwrap.fill(
            "Fine-tune a model. Every setting below can stand in the YAML file under its section, or on the command "
            "line, which wins. Values are YAML: [a, b] is a list, {a: 1} a mapping, null nothing. Paths are relative "
            "to the current folder.",
            width,
        )
        indent = " " * (max(map(len, _OPTIONS)) + 4)
        options = [
            textwrap.fill(f"  {name:<{len(indent) - 2}}{what}", width, subsequent_indent=indent)
            for name, what in _OPTIONS.items()
        ]
        return "\n".join([f"usage: {_USAGE}", "", introduction, "", *options, "", help_text(width)])


def _parser() -> ArgumentParser:
    parser = _Parser(prog="fastjax train", exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--config", action=ActionConfigFile)
    for name, section in SECTIONS.items():
        parser.add_class_arguments(section, name, fail_untyped=True)
    return parser


def _read(file: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config: cannot read {file}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = getattr(error, "problem_mark", None)
        line = f":{where.line + 1}" if where is not None else ""
        raise ConfigError(f"{file}{line}: not valid YAML: {getattr(error, 'problem', None) or error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: expected the sections {', '.join(SECTIONS)}, given {_show(content)}")
    for name, section in content.items():
        if name not in SECTIONS:
            raise ConfigError(f"{file}: {_unknown(str(name))}")
        if not isinstance(section, dict):
            keys = ", ".join(_keys(name))
            raise ConfigError(f"{file}: {name}: expected a section with the keys {keys}, given {_show(section)}")
        for key in section:
            if key not in _keys(name):
                raise ConfigError(f"{file}: {_unknown(f'{name}.{key}')}")
    return content


def _explain(message: str, argv: Sequence[str], file: str | None, content: dict[str, Any]) -> str:
    """The message of jsonargparse in our words; as it is, on one line, where it is of an unknown kind."""
    if match := re.search(r"unrecognized arguments: (--)?([^\s=]+)", message):
        return f"--{_unknown(match[2])}" if match[1] else f"{match[2]}: expected --section.key value"
    if match := re.search(r"arguments are required: (.+)", message):
        way_out = "" if file else "; name a YAML file with --config"
        return f"{file or 'command line'}: {match[1]}: expected a value, given none{way_out}"
    if match := re.search(r'^Parser key "([^"]+)"', message):
        key = match[1]
        kind = _kind(key)
        if kind is not None:
            given = _given(key, argv, content)
            inside = next(_wrong_sources(key, given), None) if key in ("data.train", "data.eval") else None
            wrong = inside or f"{key}: expected {describe_kind(kind)}, given {_show(given)}"
            return f"{_place(key, argv, file)}{wrong}"
    return " ".join(message.split())


def _place(key: str, argv: Sequence[str], file: str | None) -> str:
    """Where a key was set: on the command line (its own name says so: "--") or in the file."""
    if any(argument.partition("=")[0] == f"--{key}" for argument in argv):
        return "--"
    return f"{file}: " if file else ""


def _given(key: str, argv: Sequence[str], content: dict[str, Any]) -> Any:
    for index, argument in enumerate(argv):
        name, equals, value = argument.partition("=")
        if name == f"--{key}":
            return value if equals else next(iter(argv[index + 1 :]), "nothing")
    value: Any = content
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _wrong_sources(key: str, given: Any) -> Iterator[str]:
    """What is wrong with the sections in a list of data sets."""
    kinds = typing.get_type_hints(DataSource)
    for index, source in enumerate(given if isinstance(given, list) else []):
        if not isinstance(source, dict):
            continue
        where = f"{key}[{index}]"
        if "path" not in source:
            yield f"{where}: expected a section with path, given {_show(source)}"
        for name, value in source.items():
            if name not in kinds:
                yield f"{where}.{name}: unknown; expected one of {', '.join(kinds)}"
            elif not _fits(value, kinds[name]):
                yield f"{where}.{name}: expected {describe_kind(kinds[name])}, given {_show(value)}"


def _fits(value: Any, kind: Any) -> bool:
    if options := typing.get_args(kind) if typing.get_origin(kind) is not dict else ():
        return any(_fits(value, option) for option in options)
    if isinstance(value, bool) and kind is not bool:
        return False
    return isinstance(value, (int, float) if kind is float else typing.get_origin(kind) or kind)


def _keys(section: str) -> list[str]:
    return [field.name for field in dataclasses.fields(SECTIONS[section])]


def _kind(key: str) -> Any:
    section, _, field = key.partition(".")
    return typing.get_type_hints(SECTIONS[section]).get(field) if section in SECTIONS else None


def _unknown(key: str) -> str:
    section, _, field = key.partition(".")
    if section in SECTIONS and field:
        known, what, name = _keys(section), f"keys of {section}", field
    else:
        known, what, name = list(SECTIONS), "sections", section
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"{key}: unknown; did you mean {close[0]}? `fastjax train --help` lists the {what}"
    return f"{key}: unknown; expected one of the {what}: {', '.join(known)}"


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
