"""The NF4 benchmark at a tiny size: it runs, its lines are complete, its file holds them."""

import json

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from fastjax.bench import nf4, nf4_float8, timing
from fastjax.bench.trace import Kernel

TINY = nf4.NF4Case(
    shapes=((64, 256),), dtypes=("bfloat16", "float32"), rows=(4,), dtype="float32", cold_bytes=2**14, rounds=2
)


def test_lines_table_and_file(tmp_path):
    console = Console(record=True, width=160)
    lines = nf4.run(TINY, tmp_path / "nf4.json", console)
    found = [(line.operation, line.implementation, line.dtype) for line in lines]
    assert ("copy", "xla", "uint32") in found and ("product", "dense", "float32") in found
    assert ("gradient", "dense", "float32") in found and ("gradient", "xla", "float32") in found
    ratios = [line.of_dense for line in lines if line.implementation == "dense"]
    assert ratios == [1.0, 1.0]
    assert {("decode", "xla", "bfloat16"), ("decode", "xla", "float32"), ("product", "xla", "float32")} <= set(found)
    assert all(line.best <= line.microseconds <= line.worst for line in lines)
    saved = json.loads((tmp_path / "nf4.json").read_text())
    assert len(saved["results"]) == len(lines) and saved["case"]["shapes"] == [[64, 256]]
    text = console.export_text()
    told = [line for line in text.splitlines() if line.startswith("64×256 ")]
    assert len(told) == len(lines) and any("decode by xla, bfloat16: " in line for line in told)
    assert text.index(told[-1]) < text.index("NF4 · 64×256")  # as they are there, before the table


def test_lines_of_float8():
    case = nf4.NF4Case(
        shapes=((64, 256),), dtypes=(), rows=(nf4_float8.LEAST_ROWS,), cold_bytes=2**14, dtype="bfloat16", rounds=2
    )
    found = {(line.operation, line.implementation, line.rows) for line in nf4.run(case, console=Console(quiet=True))}
    assert {("decode", "xla", None), ("transpose", "xla", None), ("round", "xla", 512)} <= found
    names = ("dense", "float8", "float8alone", "float8promoted")
    assert {(operation, name, 512) for operation in ("product", "gradient") for name in names} <= found


def test_the_bytes_of_a_decode():
    assert nf4.decode_bytes((4096, 14336), "bfloat16") == 58720256 * 2.5 + 917504 * 4


def test_programs_take_turns_and_are_divided_by_their_calls(monkeypatch):
    programs = [timing.Program(name, lambda x: [x + 1] * 4, (jnp.zeros(8),), 4) for name in ("one", "another")]
    if jax.default_backend() == "cpu":
        clock = iter(range(100))
        monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(clock)))
        measured = timing.measure(programs, rounds=3)
        assert measured == {name: timing.Timing(0.25, 0.25, 0.25, "wall clock") for name in ("one", "another")}


def test_overlapping_kernels_count_once():
    spans = [(0.0, 10.0), (5.0, 12.0), (20.0, 21.0), (100.0, 101.0), (101.0, 103.0), (102.0, 102.5)]
    kernels = [Kernel("/device:GPU:0", "kernel", "jit_it", "", *span) for span in spans]
    assert timing._busy(kernels, 2) == pytest.approx([13e-9, 3e-9])
