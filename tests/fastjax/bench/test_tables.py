"""Tables of measurements as they look where a terminal is 80 columns wide, and how cases are timed."""

import io

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from fastjax.bench import attention, nf4, timing
from fastjax.bench.tables import print_rows
from fastjax.bench.timing import Case, why
from fastjax.bench.trace import Kernel


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=80)


def printed(console: Console) -> str:
    text = console.file.getvalue()
    assert "…" not in text
    return text


def test_reasons_stand_below_once(console):
    rows = [{"by": "ours", "ms": 1.0, "reason": None}]
    rows += [{"by": "theirs", "ms": None, "reason": "a reason of [several] words"}] * 2
    print_rows(console, "title", rows, {"by": "by"}, {"ms": ("ms", ".1f")})
    text = printed(console)
    assert text.count("theirs: a reason of [several] words") == 1
    assert text.index("ours") < text.index("theirs")


@pytest.mark.parametrize(
    ("bench", "words", "numbers", "expected"),
    [
        (
            attention.BENCH,
            {"direction": "forward", "implementation": "mosaic"},
            {"teraflops_per_second": 1234.0, "times_cudnn": 10.5, "share": 116.82},
            "1,234.0",
        ),
        (
            nf4.BENCH,
            {"operation": "gradient", "implementation": "bitsandbytes", "dtype": "bfloat16"},
            {"gigabytes_per_second": 4123.0, "teraflops_per_second": 688.5, "of_dense": 0.97},
            "688.5",
        ),
    ],
    ids=["attention", "nf4"],
)
def test_the_longest_cells_fit(console, bench, words, numbers, expected):
    row = dict.fromkeys(("microseconds", "best", "worst"), 13269.9) | words | numbers | {"reason": None}
    times = {"µs": ("microseconds", ",.1f"), "best": ("best", ",.1f"), "worst": ("worst", ",.1f")}
    print_rows(console, "title", [row], bench.words, times | dict(bench.numbers))
    assert expected in printed(console)


def test_cases_take_turns_and_are_divided_by_their_number(monkeypatch):
    cases = [Case({"by": "ours"}, lambda x: [x + 1] * 4, (jnp.zeros(8),), 4, flops=0.5)] * 2
    if jax.default_backend() == "cpu":
        clock = iter(range(100))
        monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(clock)))
        for row in timing.measure(cases, rounds=3):
            assert (row["microseconds"], row["best"], row["worst"]) == (0.25e6, 0.25e6, 0.25e6)
            assert (row["by"], row["source"], row["teraflops_per_second"]) == ("ours", "wall clock", 2e-12)


def test_cases_that_fail_do_not_stop_the_others():
    def failing(rounds):
        raise RuntimeError("not\ninstalled")

    x = (jnp.zeros(8),)
    cases = [Case({}, lambda x: x.reshape(7), x), Case({}, lambda x: x + 1, x), Case({}, failing)]
    cases += [Case({}, lambda rounds: [1.0, 2.0, 4.0]), Case({}, ValueError("no"))]
    bad, good, other, timed, absent = timing.measure(cases, rounds=1)
    assert "reshape" in bad["reason"] and bad["microseconds"] is None
    assert good["reason"] is None and good["microseconds"] > 0 and good["temporary_bytes"] >= 0
    assert (other["reason"], absent["reason"], other["source"]) == ("not installed", "no", None)
    assert (timed["microseconds"], timed["best"], timed["worst"], timed["source"]) == (2e6, 1e6, 4e6, "events")


def test_reasons_are_one_line():
    refused = "attention: implementation 'x' cannot serve this call: no (pass implementation=None)"
    assert why(NotImplementedError(refused)) == "no"
    assert why(ValueError("a\n  b")) == "a b"
    assert why(ValueError()) == "ValueError"


def test_overlapping_kernels_count_once():
    spans = [(0.0, 10.0), (5.0, 12.0), (20.0, 21.0), (100.0, 101.0), (101.0, 103.0), (102.0, 102.5)]
    kernels = [Kernel("/device:GPU:0", "kernel", "jit_it", *span) for span in spans]
    assert timing._busy(kernels, 2) == pytest.approx([13e-9, 3e-9])
