"""`fastjax bench`: measure a kernel, a whole train step or the preparation of data on this machine."""

import argparse
import dataclasses
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastjax.commands import bench_attention, bench_step
from fastjax.commands.arguments import positive

_DTYPES = ("bfloat16", "float16", "float32")


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Args:
        argv: `attention`, `nf4`, `lora`, `loss`, `moe`, `step` or `data`, and its arguments.
    """
    arguments = _parser().parse_args(argv, argparse.Namespace(argv=argv))
    arguments.run(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fastjax bench", description="Measure on this machine.")
    commands = parser.add_subparsers(required=True, metavar="WHAT")

    nf4 = commands.add_parser(
        "nf4",
        help="decoding NF4 weights, and multiplying by them",
        description="Time the decoding of NF4 weights by every implementation that this device has, and products with "
        "them and their gradients, out of a cold cache. The defaults suit a GPU.",
    )
    nf4.add_argument(
        "--shape",
        dest="shapes",
        type=positive,
        nargs=2,
        action="append",
        metavar=("OUT", "IN"),
        help="of a weight; may be repeated (default: 4096 14336 and 14336 4096)",
    )
    nf4.add_argument("--dtypes", nargs="+", choices=_DTYPES, help="of the decoded weight (default: all three)")
    nf4.add_argument("--rows", type=positive, nargs="*", metavar="N", help="of x in the products; nothing: no products")
    nf4.add_argument("--cold_bytes", type=positive, metavar="N", help="packed bytes to go over (default: 256 MiB)")
    _add_common(nf4, "nf4", "of the products")

    lora = commands.add_parser(
        "lora",
        help="a gated block with adapters, beside the same block frozen",
        description="Time a gated block forward and backward: frozen, with adapters as plain sums, and with adapters "
        "as models compute them. The defaults suit a GPU.",
    )
    lora.add_argument("--tokens", type=positive, nargs=2, metavar=("ROWS", "LENGTH"), help="(default: 4 2048)")
    lora.add_argument(
        "--shape", type=positive, nargs=2, metavar=("WIDTH", "FEATURES"), help="of the block (default: 4096 14336)"
    )
    lora.add_argument("--weights", nargs="+", choices=("nf4", *_DTYPES), help="(default: nf4 bfloat16)")
    lora.add_argument("--ranks", type=positive, nargs="+", metavar="R", help="of the adapters (default: 16 64)")
    _add_common(lora, "lora", "of the activations")

    loss = commands.add_parser(
        "loss",
        help="the head and its loss, beside the two matrix products alone",
        description="Time a frozen head with its loss, forward and backward to the input, by implementation and size "
        "of the chunks, beside the two matrix products alone. The defaults suit a GPU.",
    )
    loss.add_argument("--tokens", type=positive, nargs=2, metavar=("ROWS", "LENGTH"), help="(default: 4 2048)")
    loss.add_argument(
        "--shape", type=positive, nargs=2, metavar=("WIDTH", "WORDS"), help="of the head (default: 4096 128256)"
    )
    loss.add_argument("--chunks", type=positive, nargs="+", metavar="N", help="tokens at once (default: 512 1024 2048)")
    loss.add_argument(
        "--implementations", nargs="+", choices=("triton", "xla"), help="(default: all that the device has)"
    )
    _add_common(loss, "loss", "of activations and head")

    moe = commands.add_parser(
        "moe",
        help="mixtures of experts: products over groups, 4-bit experts, the whole block",
        description="Time products over groups of rows and their gradients, experts in 4 bits, and a Qwen3-MoE block "
        "forward and backward, with tokens routed at random. The defaults suit a GPU.",
    )
    moe.add_argument("--parts", nargs="+", choices=("products", "formats", "few", "block"), help="(default: all four)")
    moe.add_argument("--ranks", type=int, nargs="+", metavar="R", help="of the block's adapters (default: 0 16)")
    _add_common(moe, "moe", "of the activations")

    bench_step.add_parser(commands)
    bench_attention.add_parser(commands)

    data = commands.add_parser(
        "data",
        help="preparing a data set, beside the bare tokenizer",
        description="Time the preparation of a data set (reading, chat template, tokens, mask, packing) on one core, "
        "beside the tokenizer alone on the same texts.",
    )
    data.add_argument("--data", required=True, metavar="PATH", help="the data set, as data.train takes it")
    data.add_argument(
        "--columns", nargs="*", default=[], metavar="MEANING=NAME", help="what its columns are called, as data.columns"
    )
    data.add_argument("--tokenizer", required=True, metavar="FOLDER", help="folder with a tokenizer")
    data.add_argument("--chat_template", metavar="NAME", help="as data.chat_template (default: the tokenizer's own)")
    data.add_argument("--seq", type=positive, default=2048, metavar="N", help="tokens a row (default: %(default)s)")
    data.add_argument("--rounds", type=positive, default=5, metavar="N", help="runs, the best counts (default: 5)")
    data.add_argument("--output", type=Path, metavar="FILE", help="write the results as JSON")
    data.set_defaults(run=_data)
    return parser


def _add_common(parser: argparse.ArgumentParser, bench: str, computed: str) -> None:
    """Add what the tables of `fastjax.bench` have in common.

    Args:
        parser: of the command.
        bench: the module.
        computed: what is in `--dtype`.
    """
    parser.add_argument("--dtype", choices=_DTYPES, help=f"{computed} (default: bfloat16)")
    parser.add_argument("--rounds", type=positive, metavar="N", help="runs of which the median counts (default: 9)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the results as JSON")
    parser.set_defaults(run=_measured, bench=bench)


def _measured(arguments: argparse.Namespace) -> None:
    """Measure and print the tables of a module of `fastjax.bench`."""
    from fastjax.bench import tables

    bench = importlib.import_module(f"fastjax.bench.{arguments.bench}").BENCH
    tables.run(bench, _changed(bench.settings(), arguments), arguments.output)


def _changed(case: Any, arguments: argparse.Namespace) -> Any:
    """The case with the command line's values."""
    names = (field.name for field in dataclasses.fields(case))
    given = {name: value for name in names if (value := getattr(arguments, name, None)) is not None}
    lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    if "shapes" in lists:
        lists["shapes"] = tuple(map(tuple, lists["shapes"]))
    return dataclasses.replace(case, **(given | lists))


def _data(arguments: argparse.Namespace) -> None:
    from fastjax.bench.data import DataCase, run
    from fastjax.data.settings import DataSource

    columns = dict(pair.split("=", 1) if "=" in pair else (pair, pair) for pair in arguments.columns)
    source = DataSource(arguments.data, columns=columns or None)
    case = DataCase(source, arguments.tokenizer, arguments.seq, arguments.chat_template, arguments.rounds)
    run(case, arguments.output)
