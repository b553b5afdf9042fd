"""The progress of a run on the console: a live line on a terminal, plain lines elsewhere."""

import datetime

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from fastjax.training.metrics import Row, Sink


def make_progress(total_steps: int, logging_steps: int, console: Console) -> Sink:
    """The sink that suits the console.

    Args:
        total_steps: the number of steps of the run.
        logging_steps: a plain line every so many steps; a live line shows every step.
        console: where to.
    """
    return LiveLine(total_steps, console) if console.is_terminal else PlainLines(total_steps, logging_steps, console)


class LiveLine:
    """One line with a bar that is drawn over; evaluations stay above it."""

    def __init__(self, total_steps: int, console: Console):
        """Draw the line.

        Args:
            total_steps: the number of steps of the run.
            console: a terminal.
        """
        bar = [BarColumn(bar_width=24)] if console.width >= 110 else []  # the numbers alone fill 80 columns
        self._progress = Progress(*bar, MofNCompleteColumn(), TextColumn("{task.description}"), console=console)
        self._task = self._progress.add_task("compiling the train step", total=total_steps)
        self._progress.start()

    def write(self, row: Row) -> None:
        """Show a row."""
        if "loss" in row:
            self._progress.update(self._task, completed=row["step"], description=describe(row))
        else:
            self._progress.console.print(f"step {row['step']}: {describe(row)}", highlight=False)

    def close(self) -> None:
        """Leave the last line as it stands."""
        self._progress.stop()


class PlainLines:
    """A line every so many steps, for logs: the first and the last step and evaluations always have one."""

    def __init__(self, total_steps: int, logging_steps: int, console: Console):
        """Print nothing yet.

        Args:
            total_steps: the number of steps of the run.
            logging_steps: a line every so many steps.
            console: any output.
        """
        self._total, self._every, self._console = total_steps, logging_steps, console

    def write(self, row: Row) -> None:
        """Print a row when it is its turn."""
        step = row["step"]
        if "loss" not in row or step % self._every == 0 or step in (1, self._total):
            self._console.print(f"step {step}/{self._total}: {describe(row)}", highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Nothing is open."""


def describe(row: Row) -> str:
    """A row in words: `loss 1.2345  lr 2.0e-04  grad norm 0.52  12,345 tokens/s  0:01:10 left`."""
    if "loss" not in row:
        parts = [
            f"held-out loss {row['eval_loss']:.4f}",
            f"perplexity {row['eval_perplexity']:.2f}",
            f"token accuracy {row['eval_token_accuracy']:.1%}",
        ]
        return "  ".join(parts)
    parts = [f"loss {row['loss']:.4f}", f"lr {row['learning_rate']:.1e}", f"grad norm {row['grad_norm']:.2f}"]
    if row["tokens_per_second"] is not None:
        parts.append(f"{row['tokens_per_second']:,.0f} tokens/s")
        parts.append(f"{datetime.timedelta(seconds=round(row['seconds_left']))} left")
    return "  ".join(parts)
