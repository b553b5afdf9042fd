"""`fastjax bench step`: the whole train step of a model with random weights."""

import argparse
import itertools
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastjax.bench.step.case import (
    ADAPTERS,
    FILLS,
    METHODS,
    OFFLOADED,
    OPTIMIZERS,
    PARAM_DTYPES,
    REGIMES,
    Layout,
    StepCase,
    resolve_method,
)
from fastjax.bench.step.presets import PRESETS
from fastjax.commands.arguments import positive
from fastjax.errors import ConfigError
from fastjax.training.config.qat import NAMED

_REGIMES = "; ".join(
    f"{name}: " + ", ".join(f"{part.batch}×{part.seq} {part.checkpointing} {part.layer_loop}" for part in parts)
    for name, parts in REGIMES.items()
)
#: What `--regime` sets, with the values that hold without it.
_LAYOUT: dict[str, Any] = {
    "batch": 4,
    "seq": 2048,
    "checkpointing": ["projections", "full"],
    "layer_loop": ["scan"],
}
#: Options that name what is written.
_FILES = ("--output", "--markdown", "--plot", "--profile")


def add_parser(commands: Any) -> None:
    """Add the command.

    Args:
        commands: argparse's, from `add_subparsers`.
    """
    parser = commands.add_parser(
        "step",
        help="the whole train step of a model with random weights",
        description="Time the whole train step, optimizer included, of a model with random weights, in a process of "
        "its own for each combination of mesh, checkpointing, layer loop, attention and options of the compiler. Steps "
        "that do not train give no figure and exit status 1. Unsloth is measured beside it where it is installed.",
        epilog=f"regimes: {_REGIMES}.",
    )
    parser.add_argument("--preset", choices=tuple(PRESETS), default="llama3-8b", help="shape (default: %(default)s)")
    parser.add_argument("--layers", type=positive, metavar="N", help="the preset's first ones alone")
    parser.add_argument(
        "--method", choices=tuple(METHODS), help="full: every weight is trained (default: qlora, or by --weights)"
    )
    formats = tuple(dict.fromkeys(name for known in METHODS.values() for name in known))
    parser.add_argument(
        "--weights", choices=formats, help="of the base; mxfp4: a mixture's experts alone (default: by --method)"
    )
    parser.add_argument("--rank", type=positive, metavar="N", help="of the adapters (default: 16)")
    parser.add_argument(
        "--adapters", choices=ADAPTERS, help="all: on every projection, experts included (default: all)"
    )
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="(default: %(default)s)")
    parser.add_argument(
        "--param_dtype", choices=PARAM_DTYPES, help="of what is trained (default: bfloat16 with full, else float32)"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="default: by the device")
    parser.add_argument("--regime", choices=tuple(REGIMES), help="rows, checkpointing and layer loop by name")
    parser.add_argument(
        "--mesh",
        nargs="+",
        default=["one"],
        metavar="MESH",
        help="devices of this machine: one, or sizes of the axes data, fsdp, expert, context and tensor as in "
        "fsdp=2,tensor=2 (default: one)",
    )
    parser.add_argument(
        "--batch",
        type=positive,
        metavar="N",
        help="rows; on a mesh of each part along data, fsdp and expert, as in training (default: 4)",
    )
    parser.add_argument("--seq", type=positive, metavar="N", help="tokens a row (default: 2048)")
    parser.add_argument(
        "--checkpointing",
        nargs="+",
        metavar="NAME",
        help="what the backward pass recomputes, as model.use_gradient_checkpointing (default: projections full)",
    )
    parser.add_argument("--layer_loop", nargs="+", choices=("scan", "unroll"), help="(default: scan)")
    parser.add_argument(
        "--attention", nargs="+", metavar="NAME", help="implementations of attention (default: the model's own choice)"
    )
    parser.add_argument(
        "--lengths", type=Path, metavar="FILE", help="rows of documents of these lengths: .npy, or a number a line"
    )
    parser.add_argument(
        "--fill",
        nargs="+",
        choices=FILLS,
        help="rows of --lengths: packed; one document each, padded to --seq, or to the longest of its batch (default: "
        "packed). Tokens a second count no padding",
    )
    parser.add_argument("--offload_embedding", action="store_true", help="the table of embeddings on the host")
    parser.add_argument("--offload_layers", action="store_true", help="the frozen matrices of scanned layers there")
    parser.add_argument("--offload_optimizer", action="store_true", help="AdamW's moments of matrices there")
    parser.add_argument(
        "--mlp_chunk", type=positive, metavar="N", help="tokens that an MLP computes at a time (default: auto)"
    )
    parser.add_argument(
        "--compiler_options",
        nargs="+",
        metavar="SET",
        help="XLA's options for the step, NAME=VALUE,NAME=VALUE, or none; a case for each set (default: none)",
    )
    parser.add_argument(
        "--base_compute", choices=("float8",), help="dtype of the frozen matrices' products (default: --dtype)"
    )
    parser.add_argument("--qat", choices=tuple(NAMED), help="quantisation-aware training (default: none)")
    parser.add_argument(
        "--seed", type=int, default=3407, metavar="N", help="of the adapters' first values (default: %(default)s)"
    )
    parser.add_argument("--steps", type=positive, default=10, metavar="N", help="timed steps (default: %(default)s)")
    parser.add_argument(
        "--warmup", type=positive, default=3, metavar="N", help="steps before these (default: %(default)s)"
    )
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="FOLDER",
        help="trace three more steps there, for xprof and Perfetto, and print kernels by kind",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table as Markdown")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw tokens/s and memory as PNG")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    from fastjax.bench.step.run import run

    run(
        _cases(arguments),
        command=shlex.join(_without_files(arguments.argv)),
        output=arguments.output,
        text=arguments.markdown,
        plot=arguments.plot,
        profile=arguments.profile,
    )


def _without_files(argv: Sequence[str]) -> list[str]:
    """The command, but for where its results go."""
    words, left = ["fastjax", "bench"], iter(argv)
    for word in left:
        if word.partition("=")[0] not in _FILES:
            words.append(word)
        elif "=" not in word:
            next(left)
    return words


def _cases(arguments: argparse.Namespace) -> list[StepCase]:
    from fastjax.bench.attention.cases import read_lengths
    from fastjax.bench.step.mesh import read_mesh

    method, weights = resolve_method(arguments.method, arguments.weights)
    if method == "full":
        for name in ("rank", "adapters", "offload_embedding", "offload_layers"):
            if value := getattr(arguments, name):
                raise ConfigError(f"bench step: --{name} is for methods with adapters, got {value} with --method full")
    layouts = _layouts(arguments)
    _check_offloads(arguments, layouts)
    common = {
        "preset": arguments.preset,
        "method": method,
        "weights": weights,
        "rank": arguments.rank or 16,
        "adapters": arguments.adapters or "all",
        "optimizer": arguments.optimizer,
        "param_dtype": arguments.param_dtype or ("bfloat16" if method == "full" else "float32"),
        "dtype": arguments.dtype,
        "steps": arguments.steps,
        "warmup": arguments.warmup,
        "lengths": None if arguments.lengths is None else tuple(read_lengths(arguments.lengths)),
        "layers": arguments.layers,
        "offload_embedding": arguments.offload_embedding,
        "offload_layers": arguments.offload_layers,
        "offload_optimizer": arguments.offload_optimizer,
        "mlp_chunk": arguments.mlp_chunk,
        "base_compute": arguments.base_compute,
        "qat": arguments.qat,
        "seed": arguments.seed,
    }
    if arguments.fill and arguments.lengths is None:
        raise ConfigError("bench step: --fill: expected --lengths beside it, whose documents it makes rows of")
    varied: dict[str, list[Any]] = {
        "attention": arguments.attention or [None],
        "fill": arguments.fill or list(FILLS[:1]),
        "compiler_options": [_options(text) for text in arguments.compiler_options or ["none"]],
        "mesh": [read_mesh(text) for text in arguments.mesh],
    }
    return [
        StepCase(**layout._asdict(), **dict(zip(varied, values, strict=True)), **common)
        for layout, *values in itertools.product(layouts, *varied.values())
    ]


def _check_offloads(arguments: argparse.Namespace, layouts: Sequence[Layout]) -> None:
    """Refuse what may not lie in the host's memory beside other options; the model and the mesh refuse more."""
    if arguments.offload_layers:
        if any(layout.layer_loop != "scan" for layout in layouts):
            where = f", of --regime {arguments.regime}" if arguments.regime else ""
            raise ConfigError(f"bench step: --offload_layers: expected --layer_loop scan alone, got unroll{where}")
        if arguments.qat is not None:
            raise ConfigError(f"bench step: --offload_layers: expected it without --qat, got {arguments.qat}")
    if arguments.offload_optimizer and arguments.optimizer not in OFFLOADED:
        expected = " or ".join(OFFLOADED)
        raise ConfigError(
            f"bench step: --offload_optimizer: expected --optimizer {expected}, got {arguments.optimizer}"
        )


def _options(text: str) -> tuple[str, ...]:
    """A set of XLA's options."""
    found = () if text == "none" else tuple(text.split(","))
    for option in found:
        if not all(option.partition("=")):
            raise ConfigError(f"bench step: --compiler_options: expected none or NAME=VALUE,NAME=VALUE, got {text}")
    return found


def _layouts(arguments: argparse.Namespace) -> list[Layout]:
    given = {name: value for name in _LAYOUT if (value := getattr(arguments, name)) is not None}
    if arguments.regime is None:
        chosen = _LAYOUT | given
        kept = itertools.product(chosen["checkpointing"], chosen["layer_loop"])
        return [Layout(chosen["batch"], chosen["seq"], *names) for names in kept]
    if given:
        raise ConfigError(f"bench step: --{next(iter(given))}: expected it without --regime, which sets it")
    return list(REGIMES[arguments.regime])
