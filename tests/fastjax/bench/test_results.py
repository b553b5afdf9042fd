"""Tables of measurements as they look where a terminal is 80 columns wide, or there is none."""

import io

import pytest
from rich.console import Console

from fastjax.bench import nf4
from fastjax.bench.attention import accuracy, speed
from fastjax.bench.results import make_table, show


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=80)


def printed(console: Console) -> str:
    text = console.file.getvalue()
    assert "…" not in text
    return text


def test_reasons_stand_below_once(console):
    table = make_table("title", ("by",), ("ms",))
    table.add_row("ours", "1.0")
    show(console, table, [("theirs", "a reason of [several] words"), ("theirs", "a reason of [several] words")])
    text = printed(console)
    assert text.count("theirs: a reason of [several] words") == 1
    assert text.index("ours") < text.index("theirs")


def test_errors(console):
    shape = "S=333 T=512 offset 64"
    lines = [
        accuracy.AccuracyResult(shape, "mosaic", (2.2e-3, 0.0, 1.7e-7, 2.3e-3), (1.01,) * 4, "xla"),
        accuracy.AccuracyResult(shape, "cudnn", beside="xla", reason="it takes no offset"),
    ]
    accuracy._show(console, lines, "bfloat16")
    text = printed(console)
    assert f"{shape} * mosaic 2.2e-3 1.01" in text and "0 1.01 1.7e-7 1.01 2.3e-3 1.01" in text
    assert f"cudnn, {shape}: it takes no offset" in text


def test_speed(console):
    numbers = {"milliseconds": 132.699, "best": 132.688, "worst": 132.734}
    rates = {"teraflops_per_second": 1234.0, "times_cudnn": 10.5, "share": 116.82}
    speed._show(console, [speed.SpeedResult("packed", "4×8192", "forward", "jax_mosaic", **numbers, **rates)])
    assert "132.688–132.734" in printed(console)


def test_products(console):
    lines = [
        nf4.NF4Result((4096, 14336), "gradient", name, "bfloat16", 8192, 1397.4, 1294, 1401, None, 688.5, 0.97, source)
        for name, source in (("mosaic", "kernels"), ("bitsandbytes", "events"))
    ]
    console.print(nf4._table(nf4.NF4Case(), (4096, 14336), lines))
    assert "time by kernels; bitsandbytes by events" in printed(console)
