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
    base = shlex.quote(config.model.model_name)
    if config.model.full_finetuning:
        use = f"fastjax generate --model {shlex.quote(str(result.folder))} --prompt '…'"
    else:
        use = f"fastjax generate --model {base} --adapter {shlex.quote(str(result.folder))} --prompt '…'"
    what = "model" if config.model.full_finetuning else "adapter"
    console.print(f"{what}: {result.folder}\nuse it: {use}", highlight=False, soft_wrap=True)
