"""The progress of a run: a live line on a terminal, a bar and a curve in Jupyter (`notebook`), plain lines elsewhere.

A row redraws the live line, four times a second at most, without a thread, at no cost to the run. On a narrow terminal
it leaves out the least important figures instead of wrapping.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from fastjax.training.metrics import Row, Sink
from fastjax.training.notebook import NotebookView
from fastjax.training.plain_lines import PlainLines, describe, figures

REDRAW_SECONDS = 0.25
"""Between two drawings of the live line."""


def make_progress(total_steps: int, logging_steps: int, console: Console) -> Sink:
    """The sink that suits the console.

    Args:
        total_steps: the number of steps of the run.
        logging_steps: a plain line every so many steps; a live line and Jupyter's bar show every step.
        console: the output.
    """
    if console.is_jupyter and not console.quiet:
        return NotebookView(total_steps, logging_steps)
    return LiveLine(total_steps, console) if console.is_terminal else PlainLines(total_steps, logging_steps, console)


class LiveLine:
    """One line, redrawn in place; evaluations, events and skipped steps stay above it."""

    def __init__(self, total_steps: int, console: Console, clock: Callable[[], float] = time.monotonic):
        """Draw the line.

        Args:
            total_steps: the number of steps of the run.
            console: a terminal.
            clock: seconds from any zero.
        """
        self._total, self._clock = total_steps, clock
        self._live = Live(Text("compiling the train step …", style="dim"), console=console, auto_refresh=False)
        self._live.start(refresh=True)
        self._drawn = -REDRAW_SECONDS

    def write(self, row: Row) -> None:
        """Show a row."""
        if "loss" not in row or row.get("skipped"):
            self._live.console.print(Text(f"step {row['step']:,}: {describe(row)}", style=_style(row)), soft_wrap=True)
        if "loss" in row:
            now = self._clock()
            due = now - self._drawn >= REDRAW_SECONDS
            self._live.update(StatusLine(row, self._total), refresh=due)
            self._drawn = now if due else self._drawn

    def close(self) -> None:
        """Leave the last line."""
        self._live.stop()


class StatusLine(NamedTuple):
    """A row of a train step as one line, at most as wide as the console.

    Attributes:
        row: the row.
        total: the number of steps of the run.
    """

    row: Row
    total: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.fit(options.max_width, ascii_only=options.ascii_only)

    def fit(self, width: int, *, ascii_only: bool = False) -> Text:
        """The line for a width.

        Args:
            width: columns.
            ascii_only: draw the bar without box characters.
        """
        step = f"{self.row['step']:>{len(f'{self.total:,}')},}/{self.total:,}"
        left = width - len(step)
        shown, known = set(), list(figures(self.row))
        for figure in sorted(known, key=lambda figure: figure.rank):
            needed = 2 + len(figure.label) + len(figure.value)
            if needed > left:
                break  # a less important one in its place would flicker
            left -= needed
            shown.add(figure)
        line = Text(no_wrap=True, overflow="crop", end="")
        if left >= 10 and len(shown) == len(known):
            line.append_text(_bar(self.row["step"] / self.total, min(30, left - 2), ascii_only)).append("  ")
        line.append(step, style="bold")
        for figure in known:
            if figure in shown:
                line.append("  ").append(figure.label, style="dim").append(figure.value, style=figure.style)
        return line


def _bar(part: float, width: int, ascii_only: bool) -> Text:
    full = round(min(part, 1.0) * width)
    done, rest = ("=", "-") if ascii_only else ("━", "─")
    return Text.assemble((done * full, "green"), (rest * (width - full), "dim"))


def _style(row: Row) -> str:
    """Evaluations in green, failures in yellow, the rest dim."""
    wrong = row.get("skipped") or row.get("event", "").endswith("failed") or row.get("event") == "interrupted"
    return "yellow" if wrong else "dim" if "event" in row else "green"
