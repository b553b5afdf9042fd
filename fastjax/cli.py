"""The command `fastjax`: finds the subcommand, runs it, and turns expected errors into one message and an exit status.

0: done. 2: the command line or the configuration is wrong. 1: anything else that can be expected, such as a broken
checkpoint or a full disk. 129, 130 and 143: interrupted, by SIGHUP, Ctrl-C or SIGTERM. A subcommand's module is
imported on demand, so that a command without JAX imports none. Of several processes each names its rank and host in
front of whatever ends it, a traceback too, and ends at once.
"""

import argparse
import importlib
import sys
import traceback
from collections.abc import Sequence
from importlib import metadata
from types import ModuleType

from convert.errors import ConvertError, shorten
from fastjax.errors import ConfigError, DataError, Interrupted, TrainingError

#: Subcommand → summary; its module is fastjax.commands.<name>, with _ for -.
COMMANDS = {
    "train": "fine-tune a model as a YAML file says",
    "launch": "run `train` in several processes of this host, a GPU each",
    "preview": "show the data of a run as the model will see them",
    "plan": "memory and speed of a run on a GPU, compiled without one",
    "compare": "several runs in one page, with the settings in which they differ",
    "generate": "let a model, with or without an adapter, answer prompts",
    "chat": "talk to a run's result, an adapter or a model",
    "serve": "serve a model and adapters over HTTP, with OpenAI's routes",
    "evaluate": "let it do tasks: answers that must match, choices of which the likeliest counts",
    "import-config": "turn a run of Axolotl, LLaMA-Factory or torchtune into settings of `train`",
    "convert": "merge adapters, quantise, compare and look into model folders",
    "bench": "measure a kernel or a whole train step on this machine",
    "quickstart": "fine-tune the embedded tiny model and show it before and after",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments after the program's name; None: those of this process.

    Returns:
        The exit status.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.command not in COMMANDS:
        parser.error(_unknown(arguments.command))
    try:
        importlib.import_module(f"fastjax.commands.{arguments.command.replace('-', '_')}").main(arguments.arguments)
    except SystemExit:
        raise
    except BaseException as error:  # a panic of a library in Rust is no Exception
        rank = _rank()
        if rank is not None and type(error).__name__ == "JaxRuntimeError":
            _processes().wait_for_words()
        ending = _ending(error, arguments.command, rank, arguments.traceback)
        if ending is None:
            raise
        text, status = ending
        try:
            print(text, file=sys.stderr, flush=True)
        finally:
            if rank is not None and not isinstance(error, Interrupted):  # which stops all at the same step
                _processes().leave(status)
        return status
    return 0


def _ending(error: BaseException, command: str, rank: str | None, with_traceback: bool) -> tuple[str, int] | None:
    """The text about what has ended a command, in one piece, and the exit status; None: Python is to tell it."""
    where = "" if rank is None else f"{rank}: "
    trace = "".join(traceback.format_exception(error)).rstrip()
    if isinstance(error, KeyboardInterrupt):
        return f"fastjax: {where}interrupted", 130
    if isinstance(error, Interrupted):
        return f"fastjax {command}: {where}{error}", 128 + error.signal_number
    if isinstance(error, ConfigError | ConvertError | DataError | TrainingError | OSError):
        text = f"fastjax {command}: error: {where}{_message(error)}"
        return (f"{trace}\n{text}" if with_traceback else text), 2 if isinstance(error, ConfigError) else 1
    if rank is None:
        return None
    return f"fastjax {command}: error: {where}unexpected {type(error).__name__}\n{trace}", 1


def _rank() -> str | None:
    """The process among several, and its host; None: it is the only one, as every one without JAX."""
    return _processes().rank_name() if "fastjax.parallel.processes" in sys.modules else None


def _processes() -> ModuleType:
    return importlib.import_module("fastjax.parallel.processes")


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    parser = argparse.ArgumentParser(
        prog="fastjax",
        description="Fast, lean fine-tuning of language models in JAX.",
        epilog="commands:\n"
        + "\n".join(f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items())
        + "\n\n`fastjax COMMAND --help` says what a command takes.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fastjax {_version()}")
    parser.add_argument("--traceback", action="store_true", help="show where in the code an error was raised")
    parser.add_argument("command", metavar="COMMAND", help="one of the commands below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    return parser


def _unknown(command: str) -> str:
    """The message of a command that there is not."""
    import difflib

    if close := difflib.get_close_matches(command[:80], COMMANDS, n=1):
        return f"{shorten(command, 80)}: unknown; did you mean {close[0]}? `fastjax --help` lists the commands"
    return f"{shorten(command, 80)}: unknown; expected one of {', '.join(COMMANDS)}"


def _version() -> str:
    try:
        return metadata.version("fastjax")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _message(error: Exception) -> str:
    """The error in words: an OSError says its file first and leaves out its number."""
    if isinstance(error, OSError) and error.strerror:
        return f"{shorten(str(error.filename))}: {error.strerror}" if error.filename else error.strerror
    return str(error)
