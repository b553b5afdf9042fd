"""`fastjax import-config`: the settings of a run of Axolotl, LLaMA-Factory or torchtune as settings of `fastjax train`.

The file is checked by the loader of `fastjax train` before it gets its name. No JAX, no model, no data.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from convert.errors import shorten, shown
from convert.files import atomic_file
from fastjax.commands.reference import SECTIONS
from fastjax.commands.settings import parse_train_config, read_yaml
from fastjax.config_import import TOOLS, Job, import_settings, tool_of
from fastjax.errors import ConfigError
from fastjax.options import hints_of
from fastjax.runs.messages import say

_WIDTH = 36


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Args:
        argv: the tool's file, and where to write.
    """
    arguments = _parser().parse_args(argv)
    file, output = Path(arguments.file), arguments.output
    if output.exists() and not (arguments.force and output.is_file()):
        raise ConfigError(f"{output}: expected a new file (--force replaces a file), got one that exists")
    content = read_yaml(arguments.file).value
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: expected the keys of {', '.join(TOOLS)}, got {shown(content, 80)}")
    tool = TOOLS[arguments.source] if arguments.source else tool_of(content, file)
    job = import_settings(tool, content, file)
    with atomic_file(output) as stream:
        stream.write(written(job).encode())
        stream.flush()
        _check(job, stream.name)
    _show(job, output, Console(soft_wrap=True))


def written(job: Job) -> str:
    """The YAML file of an import, with what was not carried over in its comments."""
    lines = [f"# From {job.tool.name}'s {shown(str(job.file))}, by fastjax import-config."]
    for title, keys in (("Not carried over", job.not_carried), ("Needed", job.notes)):
        if keys:
            lines += [f"# {title}:", *(f"#   {_line(key)}: {_line(why)}" for key, why in keys.items())]
    order = [*SECTIONS, *(f"{name}.{key}" for name, section in SECTIONS.items() for key in hints_of(section))]
    sections = {
        name: {key: keys[key] for key in sorted(keys, key=lambda key: order.index(f"{name}.{key}"))}
        for name, keys in sorted(job.config.items(), key=lambda item: order.index(item[0]))
    }
    body = yaml.dump(sections, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return "\n".join([*lines, body])


def _line(text: str) -> str:
    """A text on one line, of characters that YAML allows."""
    return "".join(character if character.isprintable() else " " for character in text)


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper without anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fastjax import-config",
        description="Turn the YAML file of a run of Axolotl, LLaMA-Factory or torchtune, supervised or over "
        "preferences, into one for `fastjax train`, and list the keys that are not needed here and those that have no "
        "equivalent, and what the run needs: a family that there is, the network. A key without which another model "
        "would come out is an error.",
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="FILE", help="the tool's file")
    parser.add_argument(
        "--output", metavar="FILE", type=Path, default=Path("run.yaml"), help="file to write (default: %(default)s)"
    )
    parser.add_argument("--from", dest="source", choices=TOOLS, help="the tool (default: the one whose keys these are)")
    parser.add_argument("--force", action="store_true", help="replace a file that is there")
    return parser


def _check(job: Job, file: str) -> None:
    """Refuse settings that `fastjax train` would refuse, by the key that they come from."""
    try:
        parse_train_config(["--config", file])
    except ConfigError as error:
        reason = re.sub(r"^(:\d+)?: ", "", str(error).removeprefix(file))
        keys = {line.key for setting, line in job.carried.items() if reason.startswith(setting)}
        where = f"{shorten(' and '.join(sorted(keys)))}: " if keys else ""
        raise ConfigError(f"{job.file}: {where}becomes {reason}") from error


def _show(job: Job, output: Path, console: Console) -> None:
    """Print what was written and what became of each key."""
    say(console, f"{output}: settings for `fastjax train`, from {job.tool.name}'s {job.file}")
    say(console, f"\ncarried over ({len(job.carried)})")
    for line in job.carried.values():
        value = yaml.dump(line.value, Dumper=_Dumper, default_flow_style=True, width=sys.maxsize).split("\n")[0]
        note = f"  ({line.note})" if line.note else ""
        say(console, f"  {line.key:<{_WIDTH}}  {line.setting}: {value}{note}")
    others = {"not needed": job.not_needed, "not carried over": job.not_carried, "needed": job.notes}
    for title, keys in others.items():
        if keys:
            say(console, f"\n{title} ({len(keys)})")
        for reason in dict.fromkeys(keys.values()):
            names = ", ".join(key for key, why in keys.items() if why == reason)
            say(console, f"  {names:<{_WIDTH}}  {reason}")
    say(console, f"\nnext: fastjax preview {output}")
