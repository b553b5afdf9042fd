"""`fastjax bench step`: the whole train step of a model with random weights."""

import argparse
import itertools
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastjax.bench.options import add_options
from fastjax.bench.step.case import StepCase, resolve_method
from fastjax.errors import ConfigError

#: Name → what is measured: the fastest step, one in little memory, and long rows.
REGIMES: dict[str, list[dict[str, Any]]] = {
    "speed": [{"checkpointing": "projections", "layer_loop": loop} for loop in ("unroll", "scan")],
    "small": [{"checkpointing": name, "layer_loop": "scan"} for name in ("offload_projections", "full")],
    "long": [
        {"batch": 1, "seq": seq, "checkpointing": name, "layer_loop": "scan"}
        for seq, name in ((16384, "offload_projections"), (65536, "offload_attention"))
    ],
}
#: Settings of which the command line takes several values, a case for each.
VARIED = ("checkpointing", "layer_loop", "attention", "mesh", "compiler_options")
#: Optimizers whose moments may lie in the host's memory.
OFFLOADED = ("adamw", "adamw_8bit")
#: Options whose defaults follow from others.
_RESOLVED = ("method", "weights", "rank", "adapters", "param_dtype")
#: Options that name what is written.
_FILES = ("--output", "--profile")


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Args:
        argv: `step` and its arguments.
    """
    from fastjax.bench.step.run import run

    parser = make_parser()
    arguments = parser.parse_args(argv[1:])
    command = shlex.join(without_files(argv))
    run(make_cases(arguments), command=command, output=arguments.output, profile=arguments.profile)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the options."""
    parser = argparse.ArgumentParser(
        prog="fastjax bench step",
        description="Time the whole train step, optimizer included, of a model with random weights, in a process of "
        "its own for each case. Steps that do not train give no figure and exit status 1. Unsloth is measured beside "
        "it where it is installed.",
    )
    add_options(parser, StepCase)
    parser.set_defaults(**dict.fromkeys((*_RESOLVED, *VARIED, "batch", "seq")))
    regimes = "; ".join(
        f"{name}: " + ", ".join(" ".join(map(str, part.values())) for part in parts) for name, parts in REGIMES.items()
    )
    parser.add_argument("--regime", choices=tuple(REGIMES), help=f"rows, checkpointing and layer loop: {regimes}")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="trace three more steps there, for xprof")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the results as JSON")
    return parser


def without_files(argv: Sequence[str]) -> list[str]:
    """The words of a command of `fastjax bench`, but for where its results go.

    Args:
        argv: what follows `fastjax bench`.
    """
    words, left = ["fastjax", "bench"], iter(argv)
    for word in left:
        if word.partition("=")[0] not in _FILES:
            words.append(word)
        elif "=" not in word:
            next(left)
    return words


def make_cases(arguments: argparse.Namespace) -> list[StepCase]:
    """The cases that the command line gives.

    Args:
        arguments: of `make_parser`.

    Raises:
        ConfigError: options that do not fit each other.
        OSError: a file cannot be read.
    """
    from fastjax.bench.documents import read_lengths
    from fastjax.bench.step.build import read_mesh

    method, weights = resolve_method(arguments.method, arguments.weights)
    given: dict[str, Any] = {name: value for name, value in vars(arguments).items() if value is not None}
    if method == "full":
        for name in ("rank", "adapters", "offload_embedding", "offload_layers"):
            if given.get(name):
                raise ConfigError(f"bench step: --{name} is for methods with adapters, got it with --method full")
        given = {"param_dtype": "bfloat16"} | given
    given |= {"method": method, "weights": weights}
    for name, read in (("mesh", read_mesh), ("compiler_options", _options)):
        given[name] = [read(text) for text in given.get(name, ())] or [None if name == "mesh" else ()]
    if arguments.lengths is not None:
        given["lengths"] = tuple(read_lengths(arguments.lengths))
    layouts: list[dict[str, Any]] = [{}]
    if arguments.regime is not None:
        layouts = REGIMES[arguments.regime]
        if twice := [name for name in ("batch", "seq", "checkpointing", "layer_loop") if name in given]:
            raise ConfigError(f"bench step: --{twice[0]}: expected it without --regime, which sets it")
    varied = {name: given.pop(name) for name in VARIED if name in given}
    for name in ("regime", "profile", "output"):
        given.pop(name, None)
    cases = []
    for layout, *values in itertools.product(layouts, *varied.values()):
        settings: dict[str, Any] = given | layout | dict(zip(varied, values, strict=True))
        cases.append(StepCase(**settings))
    _check(cases)
    return cases


def _check(cases: Sequence[StepCase]) -> None:
    """Refuse what may not lie in the host's memory, or be in chunks, beside other options; the model refuses more."""
    for case in cases:
        shape = case.mesh
        for name in ("offload_embedding", "offload_layers", "offload_optimizer", "mlp_chunk"):
            if getattr(case, name) and shape is not None and (name != "mlp_chunk" or shape.tensor > 1):
                raise ConfigError(f"bench step: --{name}: expected it without --mesh {shape}")
        if case.offload_layers and case.layer_loop != "scan":
            raise ConfigError("bench step: --offload_layers: expected --layer_loop scan alone, got unroll")
        if case.offload_layers and case.qat is not None:
            raise ConfigError(f"bench step: --offload_layers: expected it without --qat, got {case.qat}")
        if case.offload_optimizer and case.optimizer not in OFFLOADED:
            expected = " or ".join(OFFLOADED)
            raise ConfigError(f"bench step: --offload_optimizer: expected --optimizer {expected}, got {case.optimizer}")


def _options(text: str) -> tuple[str, ...]:
    """A set of XLA's options."""
    options = () if text == "none" else tuple(text.split(","))
    if not all(all(option.partition("=")) for option in options):
        raise ConfigError(f"bench step: --compiler_options: expected none or NAME=VALUE,NAME=VALUE, got {text}")
    return options
