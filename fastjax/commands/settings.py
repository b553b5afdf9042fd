"""A YAML file and overrides from the command line, as a TrainConfig.

jsonargparse reads both against the dataclasses, refuses unknown keys and converts types. Its errors are put into one
sentence that names the file (or the option), the key, what was expected and what was given.
"""

import argparse
import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from jsonargparse import ActionConfigFile, ArgumentParser  # pyright: ignore[reportPrivateImportUsage]

from fastjax.errors import ConfigError
from fastjax.training.config import TrainConfig

_SECTIONS: dict[str, type] = typing.get_type_hints(TrainConfig)
_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a string", type(None): "null"}
_PLURALS = {int: "integers", float: "numbers", str: "strings"}


def parse_train_config(argv: Sequence[str]) -> TrainConfig:
    """Read the settings of a run.

    Args:
        argv: `--config FILE` and any `--section.key value`; the latter win.

    Returns:
        The settings.

    Raises:
        ConfigError: no file, one that is not YAML, an unknown key, a wrong type, a value out of range.
        SystemExit: `--help` or `--print_config` was asked for and has been printed.
    """
    finder = argparse.ArgumentParser(prog="fastjax train", add_help=False, allow_abbrev=False)
    finder.add_argument("--config")
    file = finder.parse_known_args(argv)[0].config
    content = _read(file) if file is not None else {}
    parser = _parser()
    try:
        sections = parser.instantiate(parser.parse_args(list(argv)))
        return TrainConfig(**{name: sections[name] for name in _SECTIONS})
    except ConfigError as error:  # out of range: the message begins with the key
        key = str(error).partition(":")[0]
        raise ConfigError(f"{_place(key, argv, file)}{error}") from error
    except argparse.ArgumentError as error:
        raise ConfigError(_explain(str(error), argv, file, content)) from error


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="fastjax train",
        usage="fastjax train --config FILE [--section.key value ...]",
        description="Fine-tune a model. Every setting below can stand in the YAML file under its section, or on the "
        "command line, which wins. Paths are relative to the current folder.",
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action=ActionConfigFile, help="the YAML file")
    for name, section in _SECTIONS.items():
        parser.add_class_arguments(section, name, fail_untyped=True)
    for action in parser._actions:
        if action.dest in _SECTIONS:  # "--model FILE": a section from a file of its own, more than is needed
            action.help = argparse.SUPPRESS
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
        raise ConfigError(f"{file}: expected the sections {', '.join(_SECTIONS)}, given {_show(content)}")
    for name, section in content.items():
        if name not in _SECTIONS:
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
            given = _show(_given(key, argv, content))
            return f"{_place(key, argv, file)}{key}: expected {_describe(kind)}, given {given}"
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


def _keys(section: str) -> list[str]:
    return [field.name for field in dataclasses.fields(_SECTIONS[section])]


def _kind(key: str) -> Any:
    section, _, field = key.partition(".")
    return typing.get_type_hints(_SECTIONS[section]).get(field) if section in _SECTIONS else None


def _unknown(key: str) -> str:
    section, _, field = key.partition(".")
    if section in _SECTIONS and field:
        known, what, name = _keys(section), f"keys of {section}", field
    else:
        known, what, name = list(_SECTIONS), "sections", section
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"{key}: unknown; expected one of the {what} ({', '.join(known)}){hint}"


def _describe(kind: Any) -> str:
    """A type in words."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(map(str, arguments))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(argument) for argument in arguments)
    if origin is list:
        return f"a list of {_PLURALS[arguments[0]]}"
    if origin is dict:
        return f"a mapping from {_PLURALS[arguments[0]]} to {_PLURALS[arguments[1]]}"
    return _WORDS[kind]


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
