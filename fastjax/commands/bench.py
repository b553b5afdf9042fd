"""`fastjax bench`: measure a kernel, a whole train step or generation on this machine."""

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path

from fastjax.commands import bench_generate, bench_step

#: Modules of `fastjax.bench` with a `BENCH` → summary.
TABLES = {
    "attention": "attention by every implementation, beside cuDNN",
    "nf4": "decoding NF4 weights, and multiplying by them, beside bitsandbytes and Unsloth",
    "lora": "a gated block with adapters, beside the same block frozen",
    "loss": "the head and its loss, beside the two matrix products alone",
    "gated_delta": "the gated delta rule, beside flash-linear-attention's",
    "moe": "mixtures of experts: products over groups beside torch's, 4-bit experts, the whole block",
}


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Args:
        argv: a key of TABLES, `step` or `generate`, and its arguments.
    """
    parser = argparse.ArgumentParser(prog="fastjax bench", description="Measure on this machine.")
    commands = parser.add_subparsers(required=True, metavar="WHAT", dest="what")
    for name, summary in TABLES.items():
        commands.add_parser(name, help=summary, add_help=False)
    commands.add_parser("step", help="the whole train step of a model with random weights", add_help=False)
    commands.add_parser("generate", help="generation by a model with random weights", add_help=False)
    what = parser.parse_known_args(argv)[0].what
    if what in TABLES:
        measure(what, argv[1:])
    else:
        {"step": bench_step, "generate": bench_generate}[what].main(argv)


def measure(what: str, argv: Sequence[str]) -> None:
    """Measure and print the tables of a module of `fastjax.bench`.

    Args:
        what: a key of TABLES.
        argv: its arguments.
    """
    from fastjax.bench import tables
    from fastjax.bench.options import add_options, read_options

    bench = importlib.import_module(f"fastjax.bench.{what}").BENCH
    parser = argparse.ArgumentParser(prog=f"fastjax bench {what}", description=bench.description)
    add_options(parser, bench.settings)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the results as JSON")
    arguments = parser.parse_args(argv)
    tables.run(bench, read_options(bench.settings, arguments), arguments.output)
