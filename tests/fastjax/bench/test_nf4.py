"""The NF4 benchmark at a tiny size: it runs, its lines are complete, its file holds them."""

import json

import jax
from rich.console import Console

from fastjax.bench import nf4, tables

TINY = nf4.NF4Settings(
    shape=(64, 256), dtypes=("bfloat16", "float32"), rows=(4,), dtype="float32", cold_bytes=2**14, rounds=2
)


def test_lines_tables_and_file(tmp_path):
    console = Console(record=True, width=160)
    lines = tables.run(nf4.BENCH, TINY, tmp_path / "nf4.json", console)
    timed = [line for line in lines if line["reason"] is None]
    found = [(line["operation"], line["implementation"], line["dtype"]) for line in timed]
    assert ("copy", "xla", "uint32") in found and ("product", "dense", "float32") in found
    assert ("gradient", "dense", "float32") in found and ("gradient", "xla", "float32") in found
    ratios = [line["of_dense"] for line in timed if line["implementation"] == "dense"]
    assert ratios == [1.0, 1.0]
    assert {("decode", "xla", "bfloat16"), ("decode", "xla", "float32"), ("product", "xla", "float32")} <= set(found)
    assert all(line["best"] <= line["microseconds"] <= line["worst"] for line in timed)
    saved = json.loads((tmp_path / "nf4.json").read_text())
    assert len(saved["results"]) == len(lines) and saved["case"]["shape"] == [64, 256]
    text = console.export_text()
    assert text.index("NF4 · 64×256 · cold cache · cpu") < text.index("NF4 · 64×256 · cold cache · 4 rows")
    assert "median of 2, time by wall clock" in text
    if jax.default_backend() == "cpu":
        assert "product fused float32: " in text and "decode mosaic bfloat16: " in text  # why they have no time


def test_lines_of_float8():
    case = nf4.NF4Settings(
        shape=(64, 256), dtypes=(), rows=(nf4.LEAST_ROWS,), cold_bytes=2**14, dtype="bfloat16", rounds=2
    )
    lines = tables.run(nf4.BENCH, case, console=Console(quiet=True))
    found = {(line["operation"], line["implementation"], line["rows"]) for line in lines if line["reason"] is None}
    assert ("decode", "xla", None) in found
    assert {(operation, name, 512) for operation in ("product", "gradient") for name in ("dense", "float8")} <= found


def test_the_bytes_of_a_decode():
    assert nf4.decode_bytes((4096, 14336), "bfloat16") == 58720256 * 2.5 + 917504 * 4
