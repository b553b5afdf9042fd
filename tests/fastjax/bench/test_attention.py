"""The attention benchmark at tiny sizes: its work counts, its tables and its file."""

import dataclasses
import json

import numpy as np
import pytest
from rich.console import Console

from fastjax.bench import attention, tables
from fastjax.bench.attention import CASES, AttentionSettings, Problem, make_arrays, make_problems
from fastjax.bench.documents import segment_ids
from fastjax.errors import ConfigError

TINY = AttentionSettings(batch=2, seq=32, heads=4, kv_heads=2, dtype="float32", cold_bytes=1, rounds=2)
DOCUMENTS = ((5, 1, 20), (32,))


@pytest.mark.parametrize("window", [None, 1, 7, 100])
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_the_work_is_that_of_the_pairs_that_the_mask_leaves(window, documents):
    case = Problem("one", 2, 32, 4, 2, 64, window=window, documents=documents)
    ids = np.ones((2, 32), np.int32) if documents is None else segment_ids(documents, 32)
    place = np.arange(32)
    seen = (place[None, :] <= place[:, None]) & (place[None, :] > place[:, None] - (window or 32))
    seen = seen[None] & (ids[:, :, None] == ids[:, None, :]) & (ids[:, :, None] > 0)
    assert case.pairs() == seen.sum()
    assert attention.DIRECTIONS == {"forward": 2 * 2, "both": 2 * 2 * 3.5}


def test_cases_have_the_shapes_that_their_names_say():
    cases = {case.name: case for case in make_problems(AttentionSettings())}
    assert (cases["short"].length, cases["long"].length, cases["window"].window) == (4096, 8192, 1024)
    assert cases["documents"].documents == ((512,) * 8,) * 4
    assert (cases["cap"].cap, cases["d256"].size, cases["d256"].heads) == (50, 256, 16)
    rows = cases["packed"].documents
    assert rows is not None and len(rows) == 4
    assert all(0.9 * 8192 < sum(row) <= 8192 for row in rows)
    assert list(cases) == list(CASES)
    for case in make_problems(TINY):
        (arrays,) = make_arrays(case, "float32")
        assert arrays["q"].shape == arrays["dout"].shape == (case.batch, case.length, case.heads, case.size)
        assert arrays["k"].shape == arrays["v"].shape == (case.batch, case.length, case.kv_heads, case.size)
        assert ("ranges" in arrays, "sinks" in arrays) == (case.documents is not None, case.sinks)


def test_heads_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="heads divisible by twice kv_heads, .* got 6, 4 and 32"):
        make_problems(AttentionSettings(("short",), seq=32, heads=6, kv_heads=4))


def test_tables_and_file(tmp_path):
    settings = dataclasses.replace(TINY, cases=("short", "documents", "sinks"), implementations=("xla", "triton"))
    console = Console(record=True, width=160)
    lines = tables.run(attention.BENCH, settings, tmp_path / "attention.json", console)
    assert len(lines) == 3 * 2 * 2
    by = {(line["case"], line["direction"], line["implementation"]): line for line in lines}
    found = {problem.name: problem for problem in make_problems(settings)}
    for case, direction in (("short", "forward"), ("documents", "both"), ("sinks", "both")):
        line = by[case, direction, "xla"]
        work = attention.DIRECTIONS[direction] * 4 * 128 * found[case].pairs()
        assert line["teraflops_per_second"] == pytest.approx(work / line["microseconds"] / 1e6)
    dense, masked = by["short", "forward", "xla"], by["documents", "forward", "xla"]
    assert dense["share"] is None
    left = 8 * (4 * 5 / 2) / (32 * 33 / 2)  # eight documents of four tokens in place of one of 32
    assert masked["share"] == pytest.approx(masked["microseconds"] / (dense["microseconds"] * left))
    assert "needs an NVIDIA GPU" in by["short", "both", "triton"]["reason"]
    saved = json.loads((tmp_path / "attention.json").read_text())
    assert len(saved["results"]) == len(lines) and saved["case"]["seq"] == 32
    assert "attention · documents · 2×32" in console.export_text()


def test_speed_beside_cudnns():
    rows = [
        {"case": "short", "direction": "forward", "implementation": name, "microseconds": time}
        for name, time in (("mosaic", 2.0), ("cudnn", 3.0))
    ]
    labels, figure = attention.BENCH.beside["times_cudnn"]
    assert labels(rows[0]).items() <= rows[1].items()
    assert [figure(row, rows[1]) for row in rows] == [1.5, 1.0]
