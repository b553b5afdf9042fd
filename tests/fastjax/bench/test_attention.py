"""The attention benchmark at tiny sizes: its work counts, its tables, its files, and how block sizes are chosen."""

import dataclasses
import json
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from fastjax.bench import tables
from fastjax.bench.attention import accuracy, speed, tune
from fastjax.bench.attention.cases import (
    NAMES,
    Problem,
    chat_lengths,
    make_arrays,
    make_problems,
    packed,
    read_lengths,
    segment_ids,
)
from fastjax.bench.attention.contenders import CONTENDERS
from fastjax.bench.attention.speed import SpeedCase
from fastjax.bench.tables import why
from fastjax.bench.timing import Timing
from fastjax.errors import ConfigError
from pallas_kernels import autotune

TINY = {"batch": 2, "length": 32, "heads": 4, "kv_heads": 2}
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
    assert case.operations("forward") == 2 * 2 * 4 * 64 * seen.sum()
    assert case.operations("both") == 3.5 * case.operations("forward")


def test_cases_have_the_shapes_that_their_names_say():
    cases = {case.name: case for case in make_problems(NAMES)}
    assert (cases["short"].length, cases["long"].length, cases["window"].window) == (4096, 8192, 1024)
    assert cases["documents"].documents == ((512,) * 8,) * 4
    assert [str(cases[name]) for name in ("window", "cap", "d256")] == [
        "4×8192 window 1024", "4×8192 cap 50", "4×4096 D=256",
    ]  # fmt: skip
    rows = cases["packed"].documents
    assert rows is not None and len(rows) == 4
    assert all(0.9 * 8192 < sum(row) <= 8192 for row in rows)
    for case in make_problems(NAMES, **TINY):
        (arrays,) = make_arrays(case, "float32")
        assert arrays["q"].shape == (case.batch, case.length, case.heads, case.size)
        assert ("ranges" in arrays, "sinks" in arrays) == (case.documents is not None, case.sinks)


def test_lengths_are_those_of_the_file_or_log_normal(tmp_path):
    drawn = chat_lengths(2_000_000, 8192)
    assert np.median(drawn) == pytest.approx(math.exp(5.9), rel=0.05)
    assert min(drawn) >= 8 and max(drawn) <= 8192
    (tmp_path / "lengths.txt").write_text("3\n20\n32\n9\n")
    np.save(tmp_path / "lengths.npy", np.array([3, 20, 32, 9]))
    for name in ("lengths.txt", "lengths.npy"):
        assert read_lengths(tmp_path / name) == [3, 20, 32, 9]
    assert sorted(packed([3, 20, 40, 9], 2, 32)) == [(3, 20, 9), (32,)]


@pytest.mark.parametrize(
    "text, message", [("long\n", "a number a line"), ("", "at least 1"), ("3\n0.5\n", "at least 1")]
)
@pytest.mark.filterwarnings("ignore:.*input contained no data")
def test_other_lengths_are_refused(text, message, tmp_path):
    (tmp_path / "lengths.txt").write_text(text)
    with pytest.raises(ConfigError, match=f"lengths.txt: expected .*{message}"):
        read_lengths(tmp_path / "lengths.txt")


def test_too_few_lengths_and_heads_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="expected documents for 3 rows of 32 tokens, got 12 tokens"):
        packed([5, 7], 3, 32)
    with pytest.raises(ConfigError, match="heads divisible by twice kv_heads, .* got 6, 4 and 32"):
        make_problems(["short"], 1, 32, 6, 4)


def test_tables_and_files_of_speed(tmp_path):
    given = SpeedCase(
        ("short", "documents", "sinks"), ("xla", "triton", "jax_mosaic"), 2, 32, 4, 2, "float32", None, 1, 2
    )
    console = Console(record=True, width=160)
    lines = speed.run(given, tmp_path / "speed.json", tmp_path / "speed.png", console)
    assert len(lines) == 3 * 2 * 3
    by = {(line["case"], line["direction"], line["implementation"]): line for line in lines}
    for case, direction in (("short", "forward"), ("documents", "both"), ("sinks", "both")):
        line = by[case, direction, "xla"]
        (found,) = make_problems([case], 2, 32, 4, 2)
        rate = found.operations(direction) / line["milliseconds"] / 1e9
        assert line["teraflops_per_second"] == pytest.approx(rate)
    dense, masked = by["short", "forward", "xla"], by["documents", "forward", "xla"]
    assert dense["share"] is None
    left = 8 * (4 * 5 / 2) / (32 * 33 / 2)  # eight documents of four tokens in place of one of 32
    assert masked["share"] == pytest.approx(masked["milliseconds"] / (dense["milliseconds"] * left))
    assert "need an NVIDIA GPU" in by["short", "both", "triton"]["reason"]
    assert by["sinks", "forward", "jax_mosaic"]["reason"] == "JAX's Mosaic kernel has no sinks"
    saved = json.loads((tmp_path / "speed.json").read_text())
    assert len(saved["results"]) == len(lines) and len(saved["documents"]["documents"][0]) == 8
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")
    assert "8 documents a row" in console.export_text()


def test_speed_beside_cudnns():
    rows = [
        {"case": "short", "direction": "forward", "implementation": name, "milliseconds": time}
        for name, time in (("mosaic", 2.0), ("cudnn", 3.0))
    ]
    labels, figure = speed.BENCH.beside["times_cudnn"]
    assert labels(rows[0]).items() <= rows[1].items()
    assert [figure(row, rows[1]) for row in rows] == [1.5, 1.0]


def test_a_picture_has_a_bar_for_every_time():
    row = {"case": "short", "title": "4×4096", "direction": "both", "teraflops_per_second": 5e2, "reason": None}
    lines = [row | {"implementation": name} for name in ("mosaic", "cudnn")]
    lines.append(row | {"implementation": "tokamax", "teraflops_per_second": None, "reason": "not installed"})
    assert speed.draw(lines, "title").startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["jax_triton", "jax_mosaic", "tokamax"])
def test_what_other_kernels_lack_is_said(name):
    (case,) = make_problems(["sinks"], **TINY)
    with pytest.raises(NotImplementedError, match="sinks|not installed"):
        CONTENDERS[name](case)


def test_reasons_are_one_line():
    assert (
        why(NotImplementedError("attention: implementation 'x' cannot serve this call: no (pass implementation=None)"))
        == "no"
    )
    assert why(ValueError("a\n  b")) == "a b"
    assert why(ValueError()) == "ValueError"


def test_errors_beside_float64(tmp_path):
    console = Console(record=True, width=160)
    shapes = ("length 1", "documents", "cap, sinks, window", "S=333 T=512 offset 64")
    lines = accuracy.run(("xla", "triton"), shapes, output=tmp_path / "accuracy.json", console=console)
    assert [line["reason"] is None for line in lines] == [True, False] * 4
    for line in lines[::2]:
        assert not line["faults"] and line["beside"] == "xla"
        assert max(line["errors"]) < 5e-3  # two or three roundings of 2⁻⁹
    assert lines[0]["ratios"][1] is None and lines[0]["ratios"][3] == 1.0
    assert len(json.loads((tmp_path / "accuracy.json").read_text())["results"]) == len(lines)
    assert "all within 1.2 times" in console.export_text()


def test_faults_are_found():
    shape = Problem("", 2, 4, 4, 2, documents=((3,), ()))
    exact = [np.ones((2, 4)), np.zeros((2, 4)), np.ones((2, 4)), np.ones((2, 4))]
    padding = segment_ids(shape.documents, 4) == 0
    for array in exact:
        array[padding] = 0.0
    close = [array * 1.001 for array in exact]
    found = {"exact": exact, "cudnn": NotImplementedError("no"), "xla": close, "good": close}
    found["bad"] = [exact[0] * 1.01, exact[1] + 0.1, np.where(padding, 1e-6, close[2]), np.full((2, 4), np.nan)]
    good, bad = accuracy.compared("shape", shape, found, ("good", "bad"), "bfloat16")
    assert good["faults"] == [] and good["ratios"] == pytest.approx([1.0, None, 1.0, 1.0])
    assert bad["faults"] == [
        "out is above the bar",
        "dq is above the bar",
        "dq of padding is not zero",
        "dk of padding is not zero",
        "dv is not finite",
        "dv of padding is not zero",
    ]


@dataclasses.dataclass(frozen=True)
class Blocks:
    size: int


def job(tmp_path, sizes, run):
    kernel = autotune.Kernel("op.kernel", (tmp_path,), tmp_path / "shipped.json")
    return tune.Job(kernel, "facts", [Blocks(size) for size in sizes], run)


def test_the_fastest_block_sizes_that_run_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    found = [Timing(5.0, 0.0, 0.0, ""), ValueError("too large"), Timing(4.0, 0.0, 0.0, "")]
    monkeypatch.setattr(tables.timing, "measure", lambda calls, rounds: found)
    console = Console(record=True, width=160)
    one = job(tmp_path, (1, 3, 2), lambda config, x: x)
    found = tune.fastest([one], (jnp.ones(4),), 2, console)
    assert found == {(one.kernel, "facts"): Blocks(2)}
    assert autotune.best(one.kernel, "facts", one.candidates) == Blocks(2)
    assert "too large" in console.export_text()


def test_no_block_sizes_are_kept_where_none_run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(config, x):
        raise ValueError("too large")

    assert tune.fastest([job(tmp_path, (1, 2), run)], (jnp.ones(4),), 2, Console(record=True)) == {}
    assert not autotune.cache_file().exists()


@pytest.mark.parametrize(
    "seconds, winner", [([5.0, 4.0, 4.5], 1), ([5.0, 4.99], 0), ([None, 3.0, 2.999], 2), ([None], None)]
)
def test_who_wins(seconds, winner):
    assert tune._winner(seconds) == winner


def test_every_kernel_is_tuned_on_its_card(monkeypatch):
    """The jobs of an H200: their candidates are traced, forward and backward, with the results expected."""
    given = tune.TuneCase(batch=1, seq=256, heads=4, kv_heads=2)
    case = tune._problem(given, 64, "documents")
    arguments = tune._arguments(case, "bfloat16")
    device = jax.sharding.AbstractDevice("NVIDIA H200", 132, platform="cuda")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        jobs = tune._jobs(given, case, arguments)
        assert [one.kernel.name for one in jobs] == [
            "attention.mosaic.forward", "attention.mosaic.dq", "attention.mosaic.dkv",
            "attention.triton.forward", "attention.triton.dkv", "attention.triton.dq",
        ]  # fmt: skip
        traced = [jax.eval_shape(partial(one.run, one.candidates[-1]), *arguments) for one in jobs]
        shapes = jax.tree.map(lambda leaf: leaf.shape, traced)
    q, k = (1, 256, 4, 64), (1, 256, 2, 64)
    assert shapes == [q, (q,), (k, k), q, (k, k), (q,)]
    assert {one.facts for one in jobs} == {"bfloat16 D=64 Dv=64 causal documents grouped"}


def test_a_device_without_these_kernels_is_refused():
    with pytest.raises(ConfigError, match="cpu .* has none of"):
        tune.run(tune.TuneCase(sizes=(64,), kinds=("dense",), batch=1, seq=64, heads=4, kv_heads=2))
