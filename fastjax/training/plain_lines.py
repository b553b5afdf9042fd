"""The rows of a run in words, and the sink that prints some of them."""

from rich.console import Console

from fastjax.training.metrics import Row

PREFERENCES = {"rewards/margins": ("margin", "{:.3g}"), "rewards/accuracies": ("accuracy", "{:.0%}")}
"""Figures of preferences: a row's name → label, format."""


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


def describe(row: Row) -> str:
    """A row in words: `loss 1.2345  lr 2.0e-04  grad norm 0.52  12,345 tokens/s  0:01:10 left`."""
    if "event" in row:
        return row["message"]
    if "loss" not in row:
        known = {
            "eval_loss": "held-out loss {:.4f}",
            "eval_perplexity": "perplexity {:.2f}",
            "eval_token_accuracy": "token accuracy {:.1%}",
        }
        parts = [words.format(row[name]) for name, words in known.items() if row.get(name) is not None]
        own = [name for name in row if name.startswith("eval_") and name not in (*known, "eval_num_targets")]
        parts += [f"{name[5:]} {f'{row[name]:.4g}' if isinstance(row[name], float) else row[name]}" for name in own]
        return "  ".join(parts)
    scale = [] if row.get("loss_scale") is None else [f"loss scale {row['loss_scale']:,.0f}"]
    if row.get("skipped"):
        return "  ".join(["skipped: the gradient overflows in float16", *scale])
    own = [f"{label} {form.format(row[name])}" for name, (label, form) in PREFERENCES.items() if name in row]
    parts = [f"loss {row['loss']:.4f}", *own, f"lr {row['learning_rate']:.1e}", f"grad norm {row['grad_norm']:.3g}"]
    parts += scale
    if row.get("skipped_steps"):
        parts.append(f"{row['skipped_steps']:,} skipped")
    if row.get("tokens_per_second") is not None:
        parts.append(f"{row['tokens_per_second']:,.0f} tokens/s")
    if row.get("model_flops_utilization") is not None:
        parts.append(f"MFU {row['model_flops_utilization']:.1%}")
    if row.get("memory_bytes") is not None:
        parts.append(f"{row['memory_bytes'] / 2**30:.1f} GiB")
    if row.get("seconds_left") is not None:
        parts.append(f"{duration(row['seconds_left'])} left")
    return "  ".join(parts)
