"""`fastjax bench`: measure a kernel or a whole train step on this machine."""

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Args:
        argv: `nf4` or `step`, and its arguments.
    """
    arguments = _parser().parse_args(argv)
    arguments.run(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fastjax bench", description="Measure on this machine.")
    commands = parser.add_subparsers(required=True, metavar="WHAT")

    step = commands.add_parser(
        "step",
        help="the whole QLoRA train step of a model with random weights",
        description="Time the whole QLoRA train step, AdamW included, of a model with random weights, in a process of "
        "its own for each combination of checkpointing and layer loop.",
    )
    step.add_argument("--preset", choices=("llama3-8b", "llama1b", "tiny"), default="llama3-8b", help="shape")
    step.add_argument("--batch", type=int, default=4, metavar="N", help="rows (default: %(default)s)")
    step.add_argument("--seq", type=int, default=2048, metavar="N", help="tokens a row (default: %(default)s)")
    step.add_argument("--rank", type=int, default=16, metavar="N", help="rank of the adapters (default: %(default)s)")
    step.add_argument(
        "--checkpointing",
        nargs="+",
        choices=("full", "projections", "none"),
        default=["projections", "full"],
        help="what the backward pass recomputes (default: projections full)",
    )
    step.add_argument("--layer_loop", nargs="+", choices=("scan", "unroll"), default=["scan"], help="(default: scan)")
    step.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="default: by the device")
    step.add_argument("--steps", type=int, default=10, metavar="N", help="timed steps (default: %(default)s)")
    step.add_argument("--warmup", type=int, default=3, metavar="N", help="steps before these (default: %(default)s)")
    step.add_argument("--output", type=Path, metavar="FILE", help="write the results as JSON")
    step.set_defaults(run=_step)
    return parser


def _step(arguments: argparse.Namespace) -> None:
    from fastjax.bench.step import StepCase, run

    cases = [
        StepCase(
            preset=arguments.preset,
            batch=arguments.batch,
            seq=arguments.seq,
            rank=arguments.rank,
            checkpointing=checkpointing,
            layer_loop=layer_loop,
            dtype=arguments.dtype,
            steps=arguments.steps,
            warmup=arguments.warmup,
        )
        for checkpointing, layer_loop in itertools.product(arguments.checkpointing, arguments.layer_loop)
    ]
    run(cases, arguments.output)
