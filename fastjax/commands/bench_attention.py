"""`fastjax bench attention`: speed and accuracy of attention on this machine, and its block sizes."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from fastjax.commands.arguments import positive
from fastjax.errors import ConfigError

_EPILOG = """cases: short and long (causal rows of --seq and of twice as many tokens), documents (8 equal ones in a
short row), packed (documents of many lengths in long rows), window (an eighth of a long row), cap, sinks (long rows),
d64, d256 (short rows of heads of that size). implementations: mosaic, cudnn, triton, xla; in tables of speed also
jax_mosaic and jax_triton (the kernels that JAX comes with) and tokamax."""

#: The options that each mode takes beside --implementations and --dtype.
_TAKES = {
    "": ("cases", "batch", "seq", "heads", "kv_heads", "lengths", "rounds", "cold_bytes", "output", "plot"),
    "--accuracy": ("shapes", "output"),
    "--autotune": ("sizes", "kinds", "batch", "seq", "heads", "kv_heads", "rounds", "shipped"),
}


def add_parser(commands: Any) -> None:
    """Add the command.

    Args:
        commands: argparse's, from `add_subparsers`.
    """
    parser = commands.add_parser(
        "attention",
        help="attention by every implementation: its speed, its error, its block sizes",
        description="Time attention, forward and with its gradients, by every implementation that this device has, "
        "beside cuDNN's and other kernels, out of a cold cache; or check how exact they are (--accuracy), or measure "
        "the block sizes that they run fastest with, and keep them for training (--autotune). The defaults suit a GPU.",
        epilog=_EPILOG,
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--accuracy", action="store_true", help="errors beside float64; exit status 1 if one is above the bar"
    )
    mode.add_argument("--autotune", action="store_true", help="measure block sizes; the fastest are kept in the cache")
    parser.add_argument("--cases", nargs="+", metavar="CASE", help="of the table (default: all)")
    parser.add_argument("--implementations", nargs="+", metavar="NAME", help="(default: all that suit the device)")
    parser.add_argument("--batch", type=positive, metavar="N", help="rows (default: 4)")
    parser.add_argument("--seq", type=positive, metavar="N", help="tokens of a short row (default: 4096)")
    parser.add_argument("--heads", type=positive, metavar="N", help="query heads, half as many at D=256 (default: 32)")
    parser.add_argument("--kv_heads", type=positive, metavar="N", help="key heads (default: 8)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="(default: bfloat16)")
    parser.add_argument(
        "--lengths",
        type=Path,
        metavar="FILE",
        help="of documents to pack: .npy, or a number a line (default: log-normal, as chats have them)",
    )
    parser.add_argument("--rounds", type=positive, metavar="N", help="runs of which the median counts")
    parser.add_argument("--cold_bytes", type=positive, metavar="N", help="inputs to go over (default: 256 MiB)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw TFLOP/s as PNG")
    parser.add_argument("--shapes", nargs="+", metavar="SHAPE", help="with --accuracy: lines of its table")
    parser.add_argument("--sizes", type=positive, nargs="+", metavar="D", help="with --autotune (default: 64 128 256)")
    parser.add_argument(
        "--kinds", nargs="+", metavar="KIND", help="with --autotune (default: dense documents window cap)"
    )
    parser.add_argument(
        "--shipped", type=Path, metavar="FILE", help="with --autotune: write the shipped table with the results in it"
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    mode = "--accuracy" if arguments.accuracy else "--autotune" if arguments.autotune else ""
    names = {name for taken in _TAKES.values() for name in taken} | {"implementations", "dtype"}
    given = {name: value for name in sorted(names) if (value := getattr(arguments, name)) is not None}
    for name in given:
        if name not in (*_TAKES[mode], "implementations", "dtype"):
            modes = " or ".join(other or "tables of speed" for other, taken in _TAKES.items() if name in taken)
            raise ConfigError(f"bench attention: --{name} is for {modes}, got it with {mode or 'none of the modes'}")
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    if mode == "--accuracy":
        _accuracy(given)
    elif mode == "--autotune":
        _autotune(given)
    else:
        _speed(given)


def _speed(given: dict[str, Any]) -> None:
    from fastjax.bench.attention.speed import SpeedCase, run

    output, plot = given.pop("output", None), given.pop("plot", None)
    run(dataclasses.replace(SpeedCase(), **given), output, plot)


def _accuracy(given: dict[str, Any]) -> None:
    from fastjax.bench.attention.accuracy import run

    if any(row["faults"] for row in run(**given)):
        raise SystemExit(1)


def _autotune(given: dict[str, Any]) -> None:
    from fastjax.bench.attention.tune import TuneCase, run

    shipped = given.pop("shipped", None)
    run(dataclasses.replace(TuneCase(), **given), shipped)
