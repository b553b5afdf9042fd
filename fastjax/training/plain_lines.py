"""The rows of a run in words, and the sink that prints some of them."""

from collections.abc import Iterator
from typing import NamedTuple

from rich.console import Console

from fastjax.training.metrics import Row


class Figure(NamedTuple):
    """A figure of a train step; narrow lines keep those of low rank."""

    rank: int
    label: str
    value: str
    style: str = ""


class PlainLines:
    """A line every so many steps, for logs; the first and the last step, evaluations and events always have one."""

    def __init__(self, total_steps: int, logging_steps: int, console: Console):
        """Set the interval of the lines.

        Args:
            total_steps: the number of steps of the run.
            logging_steps: a line every so many steps.
            console: any output.
        """
        self._total, self._every, self._console = total_steps, logging_steps, console

    def write(self, row: Row) -> None:
        """Print a row if it is due."""
        step = row["step"]
        if "loss" not in row or row.get("skipped") or step % self._every == 0 or step in (1, self._total):
            line = f"step {step}/{self._total}: {describe(row)}"
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Do nothing."""


def duration(seconds: float) -> str:
    """Seconds as `1:02:03`, hours first."""
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{second:02}"


def figures(row: Row) -> Iterator[Figure]:
    """The known figures of a train step, in the order of a line."""
    yield Figure(0, "loss ", f"{row['loss']:.4f}", "bold cyan")
    if row.get("rewards/margins") is not None:
        yield Figure(4, "margin ", f"{row['rewards/margins']:.3g}")
    if row.get("rewards/accuracies") is not None:
        yield Figure(4, "accuracy ", f"{row['rewards/accuracies']:.0%}")
    yield Figure(3, "lr ", f"{row['learning_rate']:.1e}")
    yield Figure(4, "grad norm ", f"{row['grad_norm']:.3g}")
    if row.get("loss_scale") is not None:
        yield Figure(8, "loss scale ", f"{row['loss_scale']:,.0f}")
    if row.get("skipped_steps"):
        yield Figure(5, "", f"{row['skipped_steps']:,} skipped", "yellow")
    if row.get("tokens_per_second") is not None:
        yield Figure(2, "", f"{row['tokens_per_second']:,.0f} tok/s")
    if row.get("model_flops_utilization") is not None:
        yield Figure(6, "MFU ", f"{row['model_flops_utilization']:.1%}")
    if row.get("memory_bytes") is not None:
        yield Figure(7, "", f"{row['memory_bytes'] / 2**30:.1f} GiB")
    if row.get("seconds_left") is not None:
        yield Figure(1, "", f"{duration(row['seconds_left'])} left", "magenta")


def describe(row: Row) -> str:
    """A row in words: `loss 1.2345  lr 2.0e-04  grad norm 0.52  12,345 tok/s  0:01:10 left`."""
    if "event" in row:
        return row["message"]
    if row.get("skipped"):
        scale = f"  loss scale {row['loss_scale']:,.0f}" if row.get("loss_scale") is not None else ""
        return f"skipped: the gradient overflows in float16{scale}"
    if "loss" in row:
        return "  ".join(figure.label + figure.value for figure in figures(row))
    known = {
        "eval_loss": "held-out loss {:.4f}",
        "eval_perplexity": "perplexity {:.2f}",
        "eval_token_accuracy": "token accuracy {:.1%}",
    }
    parts = [words.format(row[name]) for name, words in known.items() if row.get(name) is not None]
    others = [name for name in row if name.startswith("eval_") and name not in (*known, "eval_num_targets")]
    parts += [f"{name[5:]} {f'{row[name]:.4g}' if isinstance(row[name], float) else row[name]}" for name in others]
    return "  ".join(parts)
