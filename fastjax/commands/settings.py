"""A YAML file and overrides from the command line, as a TrainConfig.

jsonargparse reads both against the dataclasses, refuses unknown keys and converts types. Its errors become one sentence
with the file (or the option), the key, the expected value and the actual one.
"""

import argparse
import dataclasses
import difflib
import itertools
import re
import shutil
import textwrap
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from jsonargparse import ActionConfigFile, ArgumentParser  # pyright: ignore[reportPrivateImportUsage]

from convert.errors import shorten, shown
from fastjax import strict_yaml
from fastjax.commands import compilation_cache
from fastjax.commands.reference import SECTIONS, help_text
from fastjax.data.settings import DataSource
from fastjax.errors import ConfigError
from fastjax.limits import MAX_MAGNITUDE, MAX_SETTINGS_BYTES, MAX_SETTINGS_VALUES
from fastjax.strict_yaml import YamlError
from fastjax.training.config import QATSettings, TrainConfig
from fastjax.training.config.kinds import describe_kind, fits

_USAGE = "fastjax train --config FILE [--section.key value ...] [--resume]"

#: Settings with sections inside, or lists of them; and the key that such a section needs.
_INSIDE = {
    "data.train": (DataSource, "path"),
    "data.eval": (DataSource, "path"),
    "training.qat": (QATSettings, "weights"),
}

#: The option of one process among several.
DISTRIBUTED = "--distributed"
#: The option for all that a run can say of itself.
VERBOSE = "--verbose"

#: Options beside the settings, with their help.
_OPTIONS = {
    "--config FILE": "the YAML file",
    "--resume": "go on from the newest whole checkpoint in output.output_dir; from the start where there is none; "
    "a finished run is left as it is",
    f"{DISTRIBUTED} [RANK]": "join the other processes of the run: as HOST:PORT,COUNT,INDEX[,GPU], or as JAX finds in "
    "the environment; of its own accord under SLURM and Open MPI",
    VERBOSE: "say of every module how it is computed, and not only of those that a faster way does not serve",
    compilation_cache.OPTION: compilation_cache.HELP,
    "--print_config": "print all settings as they would be used, as a YAML file, and exit",
    "--help": "show this and exit",
}


def parse_train_config(argv: Sequence[str]) -> TrainConfig:
    """Read the settings of a run.

    Args:
        argv: `--config FILE` and any `--section.key value`; the latter win. The options that are no settings,
            such as `--resume`, are left out.

    Returns:
        The settings.

    Raises:
        ConfigError: no file, one that is not YAML, an unknown key, a wrong type, a value out of range.
        SystemExit: after `--help` or `--print_config`.
    """
    finder = argparse.ArgumentParser(prog="fastjax train", usage=_USAGE, add_help=False, allow_abbrev=False)
    finder.add_argument("--config")
    finder.add_argument("--resume", action="store_true")
    finder.add_argument(DISTRIBUTED, nargs="?")
    finder.add_argument(VERBOSE, action="store_true")
    compilation_cache.add_option(finder)
    found, argv = finder.parse_known_args(argv)
    file = found.config
    content = _read(file) if file is not None else {}
    _check_texts(argv, file, content)
    parser = _parser()
    try:
        sections = parser.instantiate(parser.parse_args([*([f"--config={file}"] if file is not None else []), *argv]))
        return TrainConfig(**{name: sections[name] for name in SECTIONS})
    except ConfigError as error:  # out of range: the message begins with the key
        key = str(error).partition(":")[0]
        raise ConfigError(f"{_place(key, argv, file)}{error}") from error
    except OverflowError as error:  # jsonargparse's float of an integer
        key = _too_large(argv, content)
        raise ConfigError(f"{_place(key, argv, file)}{key}: expected a number of at most {MAX_MAGNITUDE:g}") from error
    except argparse.ArgumentError as error:
        raise ConfigError(_explain(str(error), argv, file, content)) from error


class _Parser(ArgumentParser):
    """jsonargparse's parser with a help in words instead of type annotations."""

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


def read_yaml(file: str) -> Any:
    """Read a file of settings.

    Args:
        file: its name.

    Returns:
        What the YAML says.

    Raises:
        OSError: it cannot be read.
        ConfigError: it is too long, or not YAML.
    """
    with open(file, "rb") as stream:
        raw = stream.read(MAX_SETTINGS_BYTES + 1)
    if len(raw) > MAX_SETTINGS_BYTES:
        raise ConfigError(f"{file}: expected settings of at most {MAX_SETTINGS_BYTES} bytes, got more")
    try:
        return strict_yaml.parse(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not valid YAML: {error}") from error
    except YamlError as error:
        line = "" if error.line is None else f":{error.line}"
        raise ConfigError(f"{file}{line}: not valid YAML: {error.problem}") from error


def _read(file: str) -> dict[str, Any]:
    try:
        content = read_yaml(file)
    except OSError as error:
        raise ConfigError(f"--config: cannot read {shorten(file)}: {error.strerror}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: expected the sections {', '.join(SECTIONS)}, got {shown(content, 80)}")
    for name, section in content.items():
        if name not in SECTIONS:
            raise ConfigError(f"{file}: {_unknown(str(name))}")
        if not isinstance(section, dict):
            keys = ", ".join(_keys(name))
            raise ConfigError(f"{file}: {name}: expected a section with the keys {keys}, got {shown(section, 80)}")
        for key in section:
            if key not in _keys(name):
                raise ConfigError(f"{file}: {_unknown(f'{name}.{key}')}")
    return content


def _check_texts(argv: Sequence[str], file: str | None, content: dict[str, Any]) -> None:
    """Refuse broken or unsuitable texts of lists and mappings, which would pass for strings, and too many values."""
    texts = [("--", name.removeprefix("--"), value) for name, value in _options(argv)]
    left = MAX_SETTINGS_VALUES
    for name, section in content.items():
        for key, value in section.items():
            left = _counted(left, value, f"{file}: {name}.{key}")
        texts += [(f"{file}: ", f"{name}.{key}", value) for key, value in section.items() if isinstance(value, str)]
    for place, key, text in texts:
        if key.endswith("+"):  # jsonargparse would append
            raise ConfigError(f"{place}{_unknown(key)}")
        tagged = text.lstrip().startswith("!")  # an unsuitable tag ends jsonargparse with a traceback
        if not tagged and text.strip()[:1] + text.strip()[-1:] not in ("[]", "{}"):
            continue
        try:
            value = strict_yaml.parse(text)
        except YamlError as error:
            raise ConfigError(f"{place}{key}: not valid YAML: {error.problem}, got {shown(text, 80)}") from error
        left = _counted(left, value, place + key)
        kind = _kind(key)
        listed = [option for option in (kind, *typing.get_args(kind)) if typing.get_origin(option) in (list, dict)]
        if listed and not fits(_with_sections(key, value), kind):
            raise ConfigError(place + _misfit(key, kind, value))


def _counted(left: int, value: Any, name: str) -> int:
    """The number of values still allowed after those of a setting."""
    stack = [value]
    while stack:
        value = stack.pop()
        inside = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
        left -= len(inside)
        stack += inside
        if left < 0:
            raise ConfigError(f"{name}: expected at most {MAX_SETTINGS_VALUES} values in lists and mappings, got more")
    return left


def _with_sections(key: str, value: Any) -> Any:
    """A value with sections inside in the form of these, unless one is wrong."""
    if key not in _INSIDE or any(_wrong_sections(key, value)):
        return value
    section, _ = _INSIDE[key]
    if isinstance(value, dict):
        return section(**value)
    return [section(**item) if isinstance(item, dict) else item for item in value]


def _misfit(key: str, kind: Any, given: Any) -> str:
    if key in _INSIDE and isinstance(given, str) and given.lstrip().startswith("{"):
        given = strict_yaml.parse(given)
    inside = next(_wrong_sections(key, given), None) if key in _INSIDE else None
    return inside or f"{key}: expected {describe_kind(kind)}, got {shown(given, 80)}"


def _options(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The options with their values."""
    for argument, following in itertools.pairwise([*argv, "nothing"]):
        name, equals, value = argument.partition("=")
        if name.startswith("--"):
            yield name, value if equals else following


def _explain(message: str, argv: Sequence[str], file: str | None, content: dict[str, Any]) -> str:
    """The message of jsonargparse in our words; unchanged, on one line, if it is of an unknown kind."""
    if match := re.search(r"unrecognized arguments: (--)?([^\s=]+)", message):
        return f"--{_unknown(match[2])}" if match[1] else f"{shorten(match[2], 80)}: expected --section.key value"
    if match := re.search(r"arguments are required: (.+)", message):
        way_out = "" if file else "; name a YAML file with --config"
        return f"{file or 'command line'}: {match[1]}: expected a value, got none{way_out}"
    if match := re.search(r'^Parser key "([^"]+)"', message):
        key = match[1]
        kind = _kind(key)
        if kind is not None:
            given = _given(key, argv, content)
            return f"{_place(key, argv, file)}{_misfit(key, kind, given)}"
    return shorten(" ".join(message.split()))


def _too_large(argv: Sequence[str], content: dict[str, Any]) -> str:
    """The first setting that is an integer beyond every float."""
    given = {f"{name}.{key}": str(value) for name, section in content.items() for key, value in section.items()}
    given |= {name.removeprefix("--"): value for name, value in _options(argv)}
    return next(
        (key for key, value in given.items() if re.search(r"[0-9a-f]{200}", value.replace("_", ""))), "settings"
    )


def _place(key: str, argv: Sequence[str], file: str | None) -> str:
    """The origin of a key: the command line ("--") or the file."""
    if any(argument.partition("=")[0] == f"--{key}" for argument in argv):
        return "--"
    return f"{file}: " if file else ""


def _given(key: str, argv: Sequence[str], content: dict[str, Any]) -> Any:
    given = [value for name, value in _options(argv) if name == f"--{key}"]
    if given:
        return given[-1]
    value: Any = content
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _wrong_sections(key: str, given: Any) -> Iterator[str]:
    """The errors in a section inside of a setting, or in those of a list."""
    section, needed = _INSIDE[key]
    kinds = typing.get_type_hints(section)
    places = [(key, given)] if section is QATSettings else []
    places += [(f"{key}[{index}]", item) for index, item in enumerate(given if isinstance(given, list) else [])]
    for where, found in places:
        if not isinstance(found, dict):
            continue
        if needed not in found:
            yield f"{where}: expected a section with {needed}, got {shown(found, 80)}"
        for name, value in found.items():
            if name not in kinds:
                yield f"{where}.{shorten(str(name), 80)}: unknown; expected one of {', '.join(kinds)}"
            elif not fits(value, kinds[name]):
                yield f"{where}.{name}: expected {describe_kind(kinds[name])}, got {shown(value, 80)}"


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
    close = difflib.get_close_matches(name[:80], known, n=1)
    if close:
        return f"{shorten(key, 80)}: unknown; did you mean {close[0]}? `fastjax train --help` lists the {what}"
    return f"{shorten(key, 80)}: unknown; expected one of the {what}: {', '.join(known)}"
