"""A YAML file and overrides from the command line, as a TrainConfig.

The sections check their values (`fastjax.options`); this module reads the file and the options, and says of every
mistake where it stands: the file with its line, or the option.
"""

import argparse
import re
import shutil
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from convert.errors import shorten, shown
from fastjax import strict_yaml
from fastjax.commands import compilation_cache
from fastjax.commands.hints import of_another_tool, unknown
from fastjax.commands.reference import SECTIONS, help_text
from fastjax.errors import ConfigError
from fastjax.limits import MAX_SETTINGS_BYTES
from fastjax.options import fits, hints_of, nested, required
from fastjax.runs.folder import settings_text
from fastjax.strict_yaml import Document, YamlError
from fastjax.training.config import TrainConfig

_USAGE = "fastjax train FILE [--section.key value ...] [--resume]"
_DESCRIPTION = (
    "Fine-tune a model. Every setting below can stand in the YAML file under its section, or on the command line, "
    "which wins. Values are YAML: [a, b] is a list, {a: 1} a mapping, null nothing. Paths are relative to the current "
    "folder."
)

#: The option of one process among several, and its help.
DISTRIBUTED = "--distributed"
_JOIN = (
    "join the other processes of the run: as HOST:PORT,COUNT,INDEX[,GPU], or as JAX finds in the environment; of its "
    "own accord under SLURM and Open MPI"
)
#: The option for all that a run can say of itself.
VERBOSE = "--verbose"
_FLAGS = {
    "--resume": "go on from the newest whole checkpoint in output.output_dir; from the start where there is none; a "
    "finished run is left as it is",
    VERBOSE: "say of every module how it is computed, and not only of those that a faster way does not serve",
    "--print_config": "print all settings as they would be used, as a YAML file, and exit",
}


def parse_train_config(argv: Sequence[str]) -> TrainConfig:
    """Read the settings of a run.

    Args:
        argv: FILE or `--config FILE`, and any `--section.key value`; the latter win. The options that are no
            settings, such as `--resume`, are left out.

    Returns:
        The settings.

    Raises:
        ConfigError: no file, one that is not YAML, an unknown key, a wrong type, a value out of range.
        SystemExit: after `--help` or `--print_config`.
    """
    parser = _Parser(prog="fastjax train", usage=_USAGE, description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--config", action="append", default=[], metavar="FILE", help="the YAML file, as FILE")
    parser.add_argument(DISTRIBUTED, nargs="?", metavar="RANK", help=_JOIN)
    for flag, text in _FLAGS.items():
        parser.add_argument(flag, action="store_true", help=text)
    compilation_cache.add_option(parser)
    flags, rest = parser.parse_known_args(argv)
    files = flags.config or ([rest.pop(0)] if rest and not rest[0].startswith("-") else [])
    if len(files) > 1:
        raise ConfigError(f"--config: expected one file, got {', '.join(map(shorten, files))}")
    config = _Given(files[0] if files else None, rest).config()
    if flags.print_config:
        print(settings_text(config), end="")
        raise SystemExit(0)
    return config


class _Parser(argparse.ArgumentParser):
    """A parser whose help goes on with that of the settings."""

    def format_help(self) -> str:
        width = max(50, min(shutil.get_terminal_size().columns, 120) - 2)
        return f"{super().format_help()}\n{help_text(width)}"


def read_yaml(file: str) -> Document:
    """Read a file of settings.

    Args:
        file: its name.

    Returns:
        Its values and their lines.

    Raises:
        OSError: it cannot be read.
        ConfigError: it is too long, or not YAML.
    """
    with open(file, "rb") as stream:
        raw = stream.read(MAX_SETTINGS_BYTES + 1)
    if len(raw) > MAX_SETTINGS_BYTES:
        raise ConfigError(f"{file}: expected settings of at most {MAX_SETTINGS_BYTES} bytes, got more")
    try:
        return strict_yaml.read(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not valid YAML: {error}") from error
    except YamlError as error:
        line = "" if error.line is None else f":{error.line}"
        raise ConfigError(f"{file}{line}: not valid YAML: {error.problem}") from error


class _Given:
    """The settings of a file and those of the command line.

    Args:
        file: the YAML file; None: there is none.
        argv: options and their values.
    """

    def __init__(self, file: str | None, argv: Sequence[str]):
        self.file, self.document = file, Document({}, None)
        if file is not None:
            try:
                self.document = read_yaml(file)
            except OSError as error:
                raise ConfigError(f"--config: cannot read {shorten(file)}: {error.strerror}") from error
        self.options = dict(_options(argv))

    def config(self) -> TrainConfig:
        """The checked settings."""
        settings = self._sections()
        needed = {name: required(section) for name, section in SECTIONS.items()}
        missing = [f"{name}.{key}" for name, keys in needed.items() for key in keys if key not in settings[name]]
        if missing:
            way_out = "" if self.file else "; name a YAML file with --config"
            where = self.file or "command line"
            raise ConfigError(f"{where}: {', '.join(missing)}: expected a value, got none{way_out}")
        try:
            return TrainConfig(**{name: section(**settings[name]) for name, section in SECTIONS.items()})
        except ConfigError as error:  # it begins with the key
            key = re.match(r"[\w.\[\]]*", str(error))
            assert key is not None
            raise ConfigError(f"{self._place(key[0])}{error}") from error

    def _sections(self) -> dict[str, dict[str, Any]]:
        """The settings as they are given, by section and key."""
        content, settings = self.document.value, {name: {} for name in SECTIONS}
        if not isinstance(content, dict):
            raise ConfigError(f"{self.file}: expected the sections {', '.join(SECTIONS)}, got {shown(content, 80)}")
        for name, section in content.items():
            if name not in SECTIONS:
                line = self.document.line([str(name)])
                where = f"{self.file}: " if line is None else f"{self.file}:{line}: "
                section, _, key = str(name).partition(".")
                if section in SECTIONS and key in hints_of(SECTIONS[section]):
                    raise ConfigError(f"{where}{name}: expected {key} within the section {section}")
                if not SECTIONS.keys() & content.keys() and (tool := of_another_tool(content)):
                    raise ConfigError(
                        f"{where}{name}: expected the sections {', '.join(SECTIONS)}, got {tool}'s settings; fastjax "
                        f"import-config {self.file} makes such of them"
                    )
                raise ConfigError(f"{where}{unknown(str(name))}")
            if not isinstance(section, dict):
                keys = f"expected a section with the keys {', '.join(hints_of(SECTIONS[name]))}"
                raise ConfigError(f"{self._place(name)}{name}: {keys}, got {shown(section, 80)}")
            for key, value in section.items():
                if key not in hints_of(SECTIONS[name]):
                    raise ConfigError(f"{self._place(f'{name}.{key}')}{unknown(f'{name}.{key}')}")
                settings[name][key] = value
        for option, text in self.options.items():
            name, _, rest = option.partition(".")
            key, _, inner = rest.partition(".")
            if name in SECTIONS and not key:
                raise ConfigError(f"--{option}: expected --section.key value")
            if name not in SECTIONS or key not in hints_of(SECTIONS[name]):
                raise ConfigError(f"--{unknown(option)}")
            if text is None:
                raise ConfigError(f"--{option}: expected a value, got none")
            if inner:  # of a mapping
                outer = settings[name].get(key)
                outer = _parsed(outer) if isinstance(outer, str) else outer
                settings[name][key] = {**(outer if isinstance(outer, dict) else {}), inner: _parsed(text)}
            else:
                settings[name][key] = text
        return {
            name: {
                key: self._value(name, key, value) if isinstance(value, str) else value for key, value in given.items()
            }
            for name, given in settings.items()
        }

    def _value(self, name: str, key: str, text: str) -> Any:
        """The value of a text: that of the YAML in it if the setting takes it, else the text itself."""
        kind = hints_of(SECTIONS[name])[key]
        bracketed = text.strip()[:1] + text.strip()[-1:] in ("[]", "{}")
        try:
            value = strict_yaml.parse(text) if text.strip() else text
        except YamlError as error:
            # A broken list or mapping, or a wrong tag, would pass for a string.
            if bracketed or text.lstrip()[:1] == "!":
                problem = f"not valid YAML: {error.problem}, got {shown(text, 80)}"
                raise ConfigError(f"{self._place(f'{name}.{key}')}{name}.{key}: {problem}") from error
            return text
        if bracketed and _takes_collections(kind):
            return value
        return text if fits(text, kind) and (isinstance(value, str) or not fits(value, kind)) else value

    def _place(self, key: str) -> str:
        """Where a key is given: the command line ("--"), or the file with its line."""
        parts = [int(part) if part.isdecimal() else part for part in re.findall(r"[^.\[\]]+", key)]
        if any(option.split(".")[:2] == parts[:2] for option in self.options):
            return "--"
        line = self.document.line(parts)
        return "" if self.file is None else f"{self.file}: " if line is None else f"{self.file}:{line}: "


def _options(argv: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """The options, without their dashes, and the values; None: there is none."""
    waiting = list(reversed(argv))
    while waiting:
        name, equals, value = waiting.pop().partition("=")
        if not name.startswith("--"):
            raise ConfigError(f"{shorten(name, 80)}: expected --section.key value")
        if not equals:
            value = waiting.pop() if waiting and not waiting[-1].startswith("--") else None
        yield name.removeprefix("--"), value


def _parsed(text: str) -> Any:
    """The value of a YAML text; the text itself if it is not YAML."""
    try:
        return strict_yaml.parse(text)
    except YamlError:
        return text


def _takes_collections(kind: Any) -> bool:
    """Whether a type has lists, mappings or sections."""
    if typing.get_origin(kind) in (list, dict) or nested(kind):
        return True
    return any(_takes_collections(part) for part in typing.get_args(kind) if not isinstance(part, str))
