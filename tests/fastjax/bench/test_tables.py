"""Tables of measurements as they look where a terminal is 80 columns wide, or there is none."""

import io

import pytest
from rich.console import Console

from fastjax.bench import nf4
from fastjax.bench.attention import speed
from fastjax.bench.attention.accuracy import _written
from fastjax.bench.tables import number, print_rows, word


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
    print_rows(console, "title", rows, {"by": word("by")}, {"ms": number("ms", ".1f")})
    text = printed(console)
    assert text.count("theirs: a reason of [several] words") == 1
    assert text.index("ours") < text.index("theirs")


def test_errors():
    row = {"errors": [2.2e-3, 0.0, 1.7e-7], "ratios": [1.01, None, 12.5]}
    assert [_written(row, place) for place in range(3)] == ["2.2e-3 1.01", "0", "1.7e-7 12.50"]


def full(bench, words, numbers):
    """A row with the longest cells."""
    return dict.fromkeys((bench.unit, "best", "worst"), 132.699) | words | numbers | {"reason": None}


@pytest.mark.parametrize(
    ("bench", "words", "numbers", "expected"),
    [
        (
            speed.BENCH,
            {"direction": "forward", "implementation": "jax_mosaic"},
            {"teraflops_per_second": 1234.0, "times_cudnn": 10.5, "share": 116.82},
            "1,234",
        ),
        (
            nf4.BENCH,
            {"operation": "transpose", "implementation": "bitsandbytes", "dtype": "bfloat16"},
            {"gigabytes_per_second": 4123.0, "teraflops_per_second": 688.5, "of_dense": 0.97},
            "688.5",
        ),
    ],
    ids=["attention", "nf4"],
)
def test_benches(console, bench, words, numbers, expected):
    rows = [full(bench, words, numbers)]
    times = {"time": number(bench.unit, ",.1f"), "best–worst": number("best–worst", ",.1f")}
    print_rows(console, "title", rows, bench.words, times | dict(bench.numbers))
    assert expected in printed(console)
