"""`fastjax train`: fine-tune as a YAML file says."""

import argparse
import os
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from fastjax.commands.compilation_cache import OPTION, keep_programs
from fastjax.commands.launch import LAUNCHER
from fastjax.commands.settings import DISTRIBUTED, VERBOSE, parse_train_config

if TYPE_CHECKING:
    from fastjax.runs.context import FineTuned


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Args:
        argv: `--config FILE`, `--resume`, `--verbose`, `--no_compilation_cache`, `--distributed` and overrides.
    """
    config = parse_train_config(argv)
    keep_programs(OPTION not in argv and not config.training.deterministic)
    from fastjax.parallel.processes import Rank, end_with_others, end_with_parent, in_cluster, is_primary, join
    from fastjax.runs.fine_tune import fine_tune  # JAX is imported once the settings are right
    from fastjax.training.report import usage_of_run

    if launcher := os.environ.pop(LAUNCHER, None):  # which ends all when one has ended
        end_with_parent(int(launcher))
    given = _distributed(argv)
    if given is not None or in_cluster():
        join(Rank.parse(given) if given else None)
        if launcher is None:
            end_with_others()
    console = Console()
    result = fine_tune(config, console, resume="--resume" in argv, verbose=VERBOSE in argv)
    if not is_primary():
        return
    console.print(f"{result.folder.name}: {result.folder}", highlight=False, soft_wrap=True)
    console.print(f"report: {result.folder.parent / 'report.html'}", highlight=False, soft_wrap=True)
    ways = usage_of_run(result.config, result.folder, result.model.hf_config, str(result.model.dtype))
    console.print(f"use it:\n{ways.own}", highlight=False, soft_wrap=True, markup=False)
    if ways.servers:
        told = f"with vLLM, llama.cpp or Ollama:\n{ways.servers}"
        console.print(told, highlight=False, soft_wrap=True, markup=False)
    if (packing := _packing(result)) is not None:
        console.print(packing, highlight=False, soft_wrap=True, markup=False)


def _distributed(argv: Sequence[str]) -> str | None:
    """The value of `--distributed`, "" where it has none; None: it is not given."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(DISTRIBUTED, nargs="?", const="")
    return parser.parse_known_args(argv)[0].distributed


def _packing(result: "FineTuned") -> str | None:
    """How to make a quantised folder, or GGUF file, of a quantisation-aware result; None: it is no such result."""
    from convert.formats import WRITERS

    aware, model = result.model.quantization_aware, result.config.model
    if aware is None:
        return None
    folder, name = str(result.folder), aware.weights
    skip = ["--skip", *aware.modules_to_not_quantize] if aware.modules_to_not_quantize else []
    nf4 = ["--base_in_nf4"] if model.in_nf4 else []
    if name not in WRITERS:
        merged = folder if model.full_finetuning else f"{folder}-merged"
        merge = [] if model.full_finetuning else [["merge", model.model_name, folder, merged, *nf4]]
        commands = [*merge, ["gguf", merged, f"{folder}-{name}.gguf", "--type", name, *skip]]
        inputs, told = (None,), "llama.cpp quantises them its own way"
    else:
        out = f"{folder}-{name}"
        quantize = ["quantize", folder, out, "--scheme", name, *skip]
        merge = ["merge", model.model_name, folder, out, "--dtype", name, *nf4, *skip]
        commands = [quantize if model.full_finetuning else merge]
        inputs, usual = WRITERS[name].inputs, WRITERS[name].activations
        told = f"servers are told {usual}" if usual else "servers are told to leave them"
    known = aware.activations in inputs
    apart = "" if known else f", but for inputs in {aware.activations}, which no such folder has a name for ({told})"
    return f"as what it was trained for{apart}: " + " && ".join(
        shlex.join(["fastjax", "convert", *c]) for c in commands
    )
