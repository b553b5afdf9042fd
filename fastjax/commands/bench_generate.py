"""`fastjax bench generate`: generation by a model with random weights."""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from fastjax.bench.generate.settings import GenerateSettings
from fastjax.bench.options import add_options, read_options
from fastjax.commands.bench_step import without_files


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Args:
        argv: `generate` and its arguments.
    """
    from fastjax.bench.generate.run import run

    arguments = make_parser().parse_args(argv[1:])
    settings, command = read_options(GenerateSettings, arguments), shlex.join(without_files(argv))
    run(settings, command=command, output=arguments.output, profile=arguments.profile)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the options."""
    parser = argparse.ArgumentParser(
        prog="fastjax bench generate",
        description="Time generation by a model with random weights in NF4, with adapters and without: steady decoding "
        "of several numbers of rows, the prefill of prompts, requests of different lengths; and compare the "
        "log-probabilities of its tokens with those of the training forward pass. Hugging Face transformers with "
        "bitsandbytes and Unsloth are measured beside the decoding where they are installed.",
    )
    add_options(parser, GenerateSettings)
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="trace two more calls, and show kernels by kind")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the results as JSON")
    return parser
