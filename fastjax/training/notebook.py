"""The progress of a run in a Jupyter notebook: a bar, the figures of the last step and the loss so far, in one output.

The output is replaced every two seconds at most, and stays as it is at the end of the run. Where no HTML is shown, in a
notebook that is run as a script, it is the plain lines.
"""

import html
import io
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from fastjax.training.metrics import Row
from fastjax.training.plain_lines import PlainLines, describe

REDRAW_SECONDS = 2.0
"""Between two drawings; one takes a tenth of a second."""
_POINTS = 500


class NotebookView:
    """One output of a cell, replaced as the run goes on; evaluations and events are listed in it."""

    def __init__(self, total_steps: int, logging_steps: int, clock: Callable[[], float] = time.monotonic):
        """Show an empty bar.

        Args:
            total_steps: the number of steps of the run.
            logging_steps: as of `PlainLines`.
            clock: seconds from any zero.
        """
        self._total, self._clock, self._drawn = total_steps, clock, -REDRAW_SECONDS
        self._text = io.StringIO()
        self._lines = PlainLines(total_steps, logging_steps, Console(file=self._text, force_jupyter=False))
        self._losses: list[tuple[int, float]] = []
        self._held_out: list[tuple[int, float]] = []
        self._told: list[str] = []
        self._last: Row = {}
        self._handle: Any = None
        self._draw()

    def write(self, row: Row) -> None:
        """Take a row, and show it if it is time."""
        self._lines.write(row)
        if "loss" in row:
            self._last = row
            self._losses.append((row["step"], row["loss"]))
        else:
            self._told.append(f"step {row['step']:,}: {describe(row)}")
            if row.get("eval_loss") is not None:
                self._held_out.append((row["step"], row["eval_loss"]))
        if self._clock() - self._drawn >= REDRAW_SECONDS:
            self._draw()

    def close(self) -> None:
        """Show what came last."""
        self._draw()

    def _draw(self) -> None:
        from IPython.display import display

        data = {"text/html": self._html(), "text/plain": self._text.getvalue()}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)
        self._drawn = self._clock()

    def _html(self) -> str:
        step = self._last.get("step", 0)
        figures = html.escape(describe(self._last)) if self._last else "compiling the train step …"
        told = "\n".join(html.escape(line) for line in self._told)
        curve = loss_curve(self._losses, self._held_out) if len(self._losses) > 1 else ""
        return (
            f'<div><progress value="{step}" max="{self._total}" style="width:20em;vertical-align:middle"></progress> '
            f"<b>{step:,}/{self._total:,}</b> {figures}</div>{curve}"
            f'<pre style="font-size:85%;white-space:pre-wrap">{told}</pre>'
        )


def loss_curve(losses: Sequence[tuple[int, float]], held_out: Sequence[tuple[int, float]]) -> str:
    """The loss by step, as SVG that light and dark pages can show.

    Args:
        losses: (step, loss) of training; of many every nth.
        held_out: (step, loss) of evaluations.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 2.4), layout="constrained")
    axes = figure.add_subplot()
    every = -(-len(losses) // _POINTS)
    axes.plot(*zip(*losses[::-every][::-1], strict=True), color="#0072b2", linewidth=1.2, label="training loss")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), color="#d55e00", marker="D", markersize=4, label="held out")
    axes.set_xlabel("step", color="gray")
    axes.tick_params(colors="gray")
    axes.grid(color="gray", alpha=0.25)
    for side in axes.spines.values():
        side.set_color("gray")
    axes.legend(frameon=False, labelcolor="gray")
    picture = io.StringIO()
    figure.savefig(picture, format="svg", transparent=True, metadata={"Date": None})
    return picture.getvalue().partition("<svg")[1] + picture.getvalue().partition("<svg")[2]
