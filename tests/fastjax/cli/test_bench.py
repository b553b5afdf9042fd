"""`fastjax bench` on tiny sizes: every figure is there, and plausible."""

import json
import os
import re
from pathlib import Path

import pytest

import fastjax
from fastjax.cli import main


def test_lora(tmp_path, capsys):
    output = tmp_path / "lora.json"
    size = ["--tokens", "2", "16", "--shape", "64", "128", "--ranks", "4", "--dtype", "float32"]
    assert main(["bench", "lora", *size, "--rounds", "2", "--output", str(output)]) == 0
    assert "gated block · 2×16 tokens · 64×128" in capsys.readouterr().out
    lines = json.loads(output.read_text())["results"]
    expected = [
        (weight, *kind) for weight in ("nf4", "bfloat16") for kind in (("frozen", 0), ("plain", 4), ("unit", 4))
    ]
    assert [(line["weight"], line["adapters"], line["rank"]) for line in lines] == expected
    for line in lines:
        assert line["best"] <= line["milliseconds"] <= line["worst"]
        frozen = next(other for other in lines if other["weight"] == line["weight"])
        cost = None if line is frozen else line["milliseconds"] / frozen["milliseconds"] - 1
        assert line["cost"] == (None if cost is None else pytest.approx(cost))
        assert line["teraflops_per_second"] == pytest.approx(12 * 32 * 64 * 128 / line["milliseconds"] / 1e9)


def test_loss(tmp_path, capsys):
    output = tmp_path / "loss.json"
    size = ["--tokens", "2", "64", "--shape", "32", "500", "--chunks", "32", "64", "--dtype", "float32"]
    assert main(["bench", "loss", *size, "--rounds", "3", "--output", str(output)]) == 0
    assert "head and loss · 2×64 tokens · 32×500 · float32" in capsys.readouterr().out
    lines = json.loads(output.read_text())["results"]
    expected = [("products", None, 32), ("loss", "xla", 32), ("products", None, 64), ("loss", "xla", 64)]
    assert [(line["part"], line["implementation"], line["chunk"]) for line in lines] == expected
    floor, whole = lines[2:]
    assert whole["over_products"] == pytest.approx(whole["milliseconds"] - floor["milliseconds"])
    assert whole["temporary_bytes"] >= 64 * 500 * 4
    assert main(["bench", "loss", *size, "--chunks", "48"]) == 2
    assert "--chunks: expected parts of 2×64 tokens, all rows in each, got 48" in capsys.readouterr().err


def test_nf4(tmp_path, capsys):
    output = tmp_path / "nf4.json"
    size = ["--shape", "64", "128", "--dtypes", "float32", "--dtype", "float32", "--rows", "4"]
    assert main(["bench", "nf4", *size, "--rounds", "2", "--cold_bytes", "8192", "--output", str(output)]) == 0
    assert "NF4 · 64×128" in capsys.readouterr().out
    lines = json.loads(output.read_text())["results"]
    found = {(line["operation"], line["implementation"]) for line in lines}
    assert {("copy", "xla"), ("decode", "xla"), ("product", "xla"), ("product", "dense")} <= found
    assert all(line["microseconds"] > 0 for line in lines if line["reason"] is None)


def test_attention(tmp_path, capsys):
    output, picture = tmp_path / "attention.json", tmp_path / "attention.png"
    size = ["--seq", "32", "--batch", "1", "--heads", "4", "--kv_heads", "2", "--cold_bytes", "1", "--rounds", "2"]
    which = ["--cases", "short", "window", "--implementations", "xla", "--output", str(output), "--plot", str(picture)]
    assert main(["bench", "attention", *size, *which]) == 0
    assert "attention · 1×64 window 8" in capsys.readouterr().out
    lines = json.loads(output.read_text())["results"]
    assert [(line["case"], line["direction"]) for line in lines] == [
        ("short", "forward"), ("short", "both"), ("window", "forward"), ("window", "both"),
    ]  # fmt: skip
    assert all(line["milliseconds"] > 0 for line in lines)
    assert picture.stat().st_size > 1000


def test_attention_accuracy(tmp_path, capsys):
    output = tmp_path / "accuracy.json"
    which = ["--shapes", "D=64", "--implementations", "xla", "--output", str(output)]
    assert main(["bench", "attention", "--accuracy", *which]) == 0
    assert "all within 1.2 times" in capsys.readouterr().out
    (line,) = json.loads(output.read_text())["results"]
    assert line["implementation"] == "xla" and not line["faults"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--cases", "dense"], "--cases: expected some of short, long, .* got dense"),
        (["--implementations", "flash"], "--implementations: expected some of mosaic, cudnn, .* got flash"),
        (["--accuracy", "--shapes", "D=8"], "--shapes: expected some of D=64, .* got D=8"),
        (["--autotune", "--kinds", "dropout"], "--kinds: expected some of dense, .* got dropout"),
        (["--accuracy", "--rounds", "3"], "--rounds is for tables of speed or --autotune, got it with --accuracy"),
        (["--shipped", "x.json"], "--shipped is for --autotune, got it with none of the modes"),
        (["--autotune"], "has none of"),
    ],
)
def test_attention_refuses(arguments, message, capsys):
    small = ["--seq", "64", "--batch", "1", "--heads", "4", "--kv_heads", "2"] if arguments == ["--autotune"] else []
    assert main(["bench", "attention", *arguments, *small]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_data(tmp_path, capsys):
    assets = Path(fastjax.__file__).parent / "assets"
    output, cores = tmp_path / "data.json", os.sched_getaffinity(0)
    where = ["--data", str(assets / "tiny-chat" / "test.jsonl"), "--tokenizer", str(assets / "tiny-llama")]
    assert main(["bench", "data", *where, "--seq", "128", "--rounds", "1", "--output", str(output)]) == 0
    assert "of the tokenizer" in capsys.readouterr().out
    result = json.loads(output.read_text())["result"]
    assert result["examples"] == 100 and result["tokens"] > 100 * 10
    assert 1 <= result["rows_over_ideal"] < 1.5
    assert result["ratio"] == pytest.approx(result["bare_seconds"] / result["prepare_seconds"])
    assert result["tokens_per_second"] == pytest.approx(result["tokens"] / result["prepare_seconds"])
    assert result["cached_seconds"] > 0
    assert "RAYON_NUM_THREADS" not in os.environ and os.sched_getaffinity(0) == cores
