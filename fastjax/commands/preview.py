"""`fastjax preview`: the rows of a run as the model will see them, and statistics of the data. No JAX, no weights."""

import argparse
from collections.abc import Sequence

from rich.console import Console

from convert.errors import shown
from fastjax.commands.settings import parse_train_config
from fastjax.errors import ConfigError
from fastjax.limits import MAX_INTEGER


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Args:
        argv: the YAML file, overrides, and the number of rows.
    """
    parser = argparse.ArgumentParser(
        prog="fastjax preview",
        usage="fastjax preview FILE [--section.key value ...] [--rows N]",
        description="Show the first rows of a run as the model will see them, with what is learnt in colour, and what "
        "becomes of the data: lengths, slots filled, what is cut or left out, steps. A model or settings that `train` "
        "would refuse are refused first. It needs no GPU and reads no weights.",
        epilog="FILE and the overrides are those of `fastjax train`, whose --help lists every setting.",
        allow_abbrev=False,
    )
    parser.add_argument("--rows", type=int, default=1, metavar="N", help="rows to show (default: %(default)s)")
    arguments, rest = parser.parse_known_args(argv)
    if arguments.rows < 0:
        raise ConfigError(f"--rows: expected 0 or more, got {shown(arguments.rows)}")
    if arguments.rows > MAX_INTEGER:
        raise ConfigError(f"--rows: expected at most {MAX_INTEGER}, got {shown(arguments.rows)}")
    config = parse_train_config(rest)
    from fastjax.preview.show import preview  # tokenizers and data are imported once the settings are right

    preview(config, arguments.rows, Console())
