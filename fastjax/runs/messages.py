"""Sentences of a run on its console."""

from rich.console import Console


def say(console: Console, text: str) -> None:
    """Print a line, as it is."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def warn(console: Console, text: str) -> None:
    """Print a warning."""
    console.print(f"warning: {text}", style="yellow", highlight=False, markup=False, soft_wrap=True)
