"""A terminal's line and a log's lines from the same rows."""

import io
import re

import pytest
from rich.cells import cell_len
from rich.console import Console

from fastjax.training.metrics import Evaluation
from fastjax.training.plain_lines import describe, duration
from fastjax.training.progress import LiveLine, StatusLine, make_progress


def row(step: int, **changes) -> dict:
    first = step == 1
    return {
        "step": step,
        "loss": 1.5,
        "learning_rate": 2e-4,
        "grad_norm": 0.25,
        "tokens_per_second": None if first else 12345.6,
        "model_flops_utilization": None if first else 0.412,
        "memory_bytes": 3 * 2**30,
        "seconds_left": None if first else 70.2,
    } | changes


FLOAT16 = {"loss_scale": 32768.0, "skipped_steps": 2}


def show(terminal: bool, rows: list[dict], total: int, width: int = 120) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=width, color_system=None, legacy_windows=False)
    sink = make_progress(total, 10, console)
    for shown in rows:
        sink.write(shown)
    sink.close()
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())


def test_plain_lines():
    rows = [row(step) for step in range(1, 26)]
    rows[21:21] = [row(21, skipped=True, **FLOAT16), {"step": 21, "event": "saved", "message": "saved [in] x/"}]
    figures = "12,346 tok/s  MFU 41.2%  3.0 GiB  0:01:10 left"
    assert show(False, [*rows, Evaluation(1.0, 0.5, 10).row(25) | {"eval_exact": 0.25}], 25).splitlines() == [
        "step 1/25: loss 1.5000  lr 2.0e-04  grad norm 0.25  3.0 GiB",
        f"step 10/25: loss 1.5000  lr 2.0e-04  grad norm 0.25  {figures}",
        f"step 20/25: loss 1.5000  lr 2.0e-04  grad norm 0.25  {figures}",
        "step 21/25: skipped: the gradient overflows in float16  loss scale 32,768",
        "step 21/25: saved [in] x/",
        f"step 25/25: loss 1.5000  lr 2.0e-04  grad norm 0.25  {figures}",
        "step 25/25: held-out loss 1.0000  perplexity 2.72  token accuracy 50.0%  exact 0.25",
    ]
    assert describe(row(2, **FLOAT16)) == (
        f"loss 1.5000  lr 2.0e-04  grad norm 0.25  loss scale 32,768  2 skipped  {figures}"
    )
    assert describe({"step": 1, "eval_exact": 3}) == "exact 3"


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 120, 160])
@pytest.mark.parametrize("changes", [{}, FLOAT16, {"loss": float("inf"), "tokens_per_second": None}])
def test_the_live_line_fits(width, changes):
    line = StatusLine(row(128, **changes), 10_000).fit(width).plain
    assert cell_len(line) <= max(width, len("   128/10,000"))
    assert "128/10,000" in line


def test_the_live_line_drops_what_matters_least():
    full = StatusLine(row(128, **FLOAT16), 1000)
    assert full.fit(36).plain == "  128/1,000  loss 1.5000"
    assert full.fit(80).plain == "  128/1,000  loss 1.5000  lr 2.0e-04  grad norm 0.25  12,346 tok/s  0:01:10 left"
    assert full.fit(150).plain == (
        "━━────────────────    128/1,000  loss 1.5000  lr 2.0e-04  grad norm 0.25  loss scale 32,768  2 skipped  "
        "12,346 tok/s  MFU 41.2%  3.0 GiB  0:01:10 left"
    )
    assert set(full.fit(140, ascii_only=True).plain) <= set(map(chr, range(32, 127)))


@pytest.mark.parametrize("width", [80, 120])
def test_live_line(width):
    rows = [row(1), row(2, skipped=True, **FLOAT16), Evaluation(1.0, 0.5, 10).row(2), row(3)]
    rows.append({"step": 3, "event": "save_failed", "message": "no checkpoint: the disk is full"})
    shown = show(True, rows, 3, width)
    assert shown.startswith("compiling the train step …")
    assert StatusLine(row(3), 3).fit(width).plain in shown
    assert "step 2: skipped: the gradient overflows in float16  loss scale 32,768\n" in shown
    assert "step 2: held-out loss 1.0000" in shown
    assert "step 3: no checkpoint: the disk is full\n" in shown


def test_the_live_line_is_drawn_four_times_a_second():
    times = iter([0.0, 0.01, 0.24, 0.25])
    file = io.StringIO()
    line = LiveLine(4, Console(file=file, force_terminal=True, width=80), clock=lambda: next(times))
    for step, loss in enumerate((0.1, 0.2, 0.3, 0.4), start=1):
        line.write(row(step, loss=loss))
    shown = [loss for loss in ("0.1000", "0.2000", "0.3000", "0.4000") if loss in file.getvalue()]
    line.close()
    assert shown == ["0.1000", "0.4000"]


def test_duration():
    assert [duration(s) for s in (0, 59.6, 3599, 86400 * 2 + 61)] == ["0:00:00", "0:01:00", "0:59:59", "48:01:01"]
