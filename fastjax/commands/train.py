"""`fastjax train`: fine-tune as a YAML file says."""

import shlex
from collections.abc import Sequence

from rich.console import Console

from fastjax.commands.settings import parse_train_config


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Args:
        argv: `--config FILE` and overrides.
    """
    config = parse_train_config(argv)
    from fastjax.fine_tuning import fine_tune  # JAX is imported once the settings are right

    console = Console()
    result = fine_tune(config, console)
    if config.model.full_finetuning:
        what, options = "model", ["--model", str(result.folder)]
    else:
        what, options = "adapter", ["--model", config.model.model_name, "--adapter", str(result.folder)]
        options += ["--load_in_4bit"] * config.model.load_in_4bit
    use = shlex.join(["fastjax", "generate", *options])
    console.print(f"{what}: {result.folder}\nuse it: {use} --prompt '…'", highlight=False, soft_wrap=True)
