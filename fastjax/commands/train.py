"""`fastjax train`: fine-tune as a YAML file says."""

from collections.abc import Sequence

from rich.console import Console

from convert.errors import ConvertError
from fastjax.commands.compilation_cache import OPTION, keep_programs
from fastjax.commands.settings import DISTRIBUTED, parse_train_config
from fastjax.errors import ConfigError, DataError, TrainingError


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Args:
        argv: `--config FILE`, `--resume`, `--no_compilation_cache`, `--distributed` and overrides.
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
        result = fine_tune(config, console, resume="--resume" in argv)
    except (ConfigError, ConvertError, DataError, TrainingError) as error:
        if (name := rank_name()) is None:
            raise
        raise type(error)(f"{name}: {error}") from error
    if not is_primary():
        return
    console.print(f"{result.folder.name}: {result.folder}", highlight=False, soft_wrap=True)
    console.print(f"report: {result.folder.parent / 'report.html'}", highlight=False, soft_wrap=True)
    command, _ = usage(result.config, result.folder, result.model.hf_config, str(result.model.dtype))
    console.print(f"use it: {command}", highlight=False, soft_wrap=True)
