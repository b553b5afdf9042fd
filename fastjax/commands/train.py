"""`fastjax train`: fine-tune as a YAML file says."""

from collections.abc import Sequence

from rich.console import Console

from fastjax.commands.compilation_cache import OPTION, keep_programs
from fastjax.commands.settings import parse_train_config


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Args:
        argv: `--config FILE`, `--resume`, `--no_compilation_cache` and overrides.
    """
    config = parse_train_config(argv)
    keep_programs(OPTION not in argv and not config.training.deterministic)
    from fastjax.runs.fine_tune import fine_tune  # JAX is imported once the settings are right
    from fastjax.training.report import usage

    console = Console()
    result = fine_tune(config, console, resume="--resume" in argv)
    console.print(f"{result.folder.name}: {result.folder}", highlight=False, soft_wrap=True)
    console.print(f"report: {result.folder.parent / 'report.html'}", highlight=False, soft_wrap=True)
    command, _ = usage(result.config, result.folder, result.model.hf_config, str(result.model.dtype))
    console.print(f"use it: {command}", highlight=False, soft_wrap=True)
