"""What a terminal and a log show of the same rows."""

import io

from rich.console import Console

from fastjax.training.metrics import Evaluation
from fastjax.training.progress import describe, make_progress


def row(step: int) -> dict:
    return {
        "step": step,
        "loss": 1.5,
        "learning_rate": 2e-4,
        "grad_norm": 0.25,
        "tokens_per_second": None if step == 1 else 12345.6,
        "seconds_left": None if step == 1 else 70.2,
    }


def show(terminal: bool, steps: int, logging_steps: int, width: int = 120) -> str:
    file = io.StringIO()
    sink = make_progress(steps, logging_steps, Console(file=file, force_terminal=terminal, width=width))
    for step in range(1, steps + 1):
        sink.write(row(step))
    sink.write(Evaluation(1.0, 0.5, 10).row(steps))
    sink.close()
    return file.getvalue()


def test_plain_lines():
    assert show(False, 25, 10).splitlines() == [
        "step 1/25: loss 1.5000  lr 2.0e-04  grad norm 0.25",
        "step 10/25: loss 1.5000  lr 2.0e-04  grad norm 0.25  12,346 tokens/s  0:01:10 left",
        "step 20/25: loss 1.5000  lr 2.0e-04  grad norm 0.25  12,346 tokens/s  0:01:10 left",
        "step 25/25: loss 1.5000  lr 2.0e-04  grad norm 0.25  12,346 tokens/s  0:01:10 left",
        "step 25/25: held-out loss 1.0000  perplexity 2.72  token accuracy 50.0%",
    ]


def test_live_line():
    for width in (80, 120):
        shown = show(True, 3, 10, width)
        assert describe(row(3)) in shown
        assert "3/3" in shown
        assert ("━" in shown) == (width == 120)
        assert "step 3: held-out loss 1.0000" in shown
