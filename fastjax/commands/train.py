"""`fastjax train`: fine-tune as a YAML file says."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from convert.errors import ConvertError
from fastjax.commands.compilation_cache import OPTION, keep_programs
from fastjax.commands.settings import DISTRIBUTED, VERBOSE, parse_train_config
from fastjax.errors import ConfigError, DataError, TrainingError

if TYPE_CHECKING:
    from fastjax.runs.training_run import FineTuned


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Args:
        argv: `--config FILE`, `--resume`, `--verbose`, `--no_compilation_cache`, `--distributed` and overrides.
    """
    config = parse_train_config(argv)
    keep_programs(OPTION not in argv and not config.training.deterministic)
    from fastjax.parallel.processes import Rank, in_cluster, is_primary, join, rank_name
    from fastjax.runs.fine_tune import fine_tune  # JAX is imported once the settings are right
    from fastjax.training.report import usage

    if DISTRIBUTED in argv or in_cluster():
        given = [*argv, ""][argv.index(DISTRIBUTED) + 1] if DISTRIBUTED in argv else ""
        join(Rank.parse(given) if given and not given.startswith("--") else None)
    console = Console()
    try:
        result = fine_tune(config, console, resume="--resume" in argv, verbose=VERBOSE in argv)
    except (ConfigError, ConvertError, DataError, TrainingError) as error:
        if (name := rank_name()) is None:
            raise
        raise type(error)(f"{name}: {error}") from error
    if not is_primary():
        return
    console.print(f"{result.folder.name}: {result.folder}", highlight=False, soft_wrap=True)
    console.print(f"report: {result.folder.parent / 'report.html'}", highlight=False, soft_wrap=True)
    command, _ = usage(result.config, result.folder, result.model.hf_config, str(result.model.dtype))
    gap = "\n" if "\n" in command else " "  # code of Python
    console.print(f"use it:{gap}{command}", highlight=False, soft_wrap=True, markup=False)
    if (packing := _packing(result)) is not None:
        console.print(f"as what it was trained for: {packing}", highlight=False, soft_wrap=True)


def _packing(result: "FineTuned") -> str | None:
    """The command that makes a quantised folder of a quantisation-aware result; None: it is no such result."""
    aware, model = result.model.quantization_aware, result.config.model
    if aware is None or aware.modules_to_not_quantize:
        return None
    out = f"{result.folder}-{aware.weights}"
    if model.full_finetuning:
        return f"fastjax convert quantize {result.folder} {out} --scheme {aware.weights}"
    base = " --base_in_nf4" if model.load_in_4bit else ""
    return f"fastjax convert merge {model.model_name} {result.folder} {out} --dtype {aware.weights}{base}"
