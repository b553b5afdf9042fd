"""`fastjax bench` on tiny sizes: every figure is there, and plausible."""

import json
import re

import pytest

from fastjax.cli import main


def test_lora(tmp_path, capsys):
    output = tmp_path / "lora.json"
    size = ["--tokens", "2", "16", "--shape", "64", "128", "--ranks", "4", "--dtype", "float32"]
    assert main(["bench", "lora", *size, "--rounds", "2", "--output", str(output)]) == 0
    assert "gated block · 2×16 tokens · 64×128" in capsys.readouterr().out
    lines = json.loads(output.read_text())["results"]
    expected = [(weight, rank) for weight in ("nf4", "bfloat16") for rank in (None, 4)]
    assert [(line["weight"], line["rank"]) for line in lines] == expected
    for line in lines:
        assert line["best"] <= line["microseconds"] <= line["worst"]
        frozen = next(other for other in lines if other["weight"] == line["weight"])
        cost = None if line is frozen else line["microseconds"] / frozen["microseconds"] - 1
        assert line["cost"] == (None if cost is None else pytest.approx(cost))
        assert line["teraflops_per_second"] == pytest.approx(12 * 32 * 64 * 128 / line["microseconds"] / 1e6)


def test_loss(tmp_path, capsys):
    output = tmp_path / "loss.json"
    size = ["--tokens", "2", "64", "--shape", "32", "500", "--chunks", "32", "64", "--dtype", "float32"]
    assert main(["bench", "loss", *size, "--rounds", "3", "--output", str(output)]) == 0
    assert "head and loss · 2×64 tokens · 32×500 · float32" in capsys.readouterr().out
    lines = json.loads(output.read_text())["results"]
    expected = [("products", None, 32), ("loss", "xla", 32), ("products", None, 64), ("loss", "xla", 64)]
    assert [(line["part"], line["implementation"], line["chunk"]) for line in lines] == expected
    floor, whole = lines[2:]
    assert whole["over_products"] == pytest.approx(whole["microseconds"] - floor["microseconds"])
    assert whole["temporary_bytes"] >= 64 * 500 * 4
    assert main(["bench", "loss", *size, "--chunks", "48"]) == 2
    assert "--chunks: expected parts of 2×64 tokens, all rows in each, got 48" in capsys.readouterr().err


def test_gated_delta(tmp_path, capsys):
    output = tmp_path / "delta.json"
    size = ["--tokens", "1", "128", "--heads", "1", "2", "--size", "16", "--dtype", "float32"]
    assert main(["bench", "gated_delta", *size, "--documents", "2", "--rounds", "2", "--output", str(output)]) == 0
    assert "gated delta · 1×128, documents 2 · 1, 2 heads of 16" in capsys.readouterr().out
    lines = json.loads(output.read_text())["results"]
    assert [(line["direction"], line["implementation"]) for line in lines] == [("forward", "xla"), ("both", "xla")]
    assert all(line["microseconds"] > 0 for line in lines)
    assert lines[0]["temporary_bytes"] < lines[1]["temporary_bytes"], "both has the states of all chunks besides"
    assert main(["bench", "gated_delta", *size, "--documents", "3"]) == 2
    assert "--documents: expected divisors of the 128 tokens of a row, got 3" in capsys.readouterr().err


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
    output = tmp_path / "attention.json"
    size = ["--seq", "32", "--batch", "1", "--heads", "4", "--kv_heads", "2", "--cold_bytes", "1", "--rounds", "2"]
    which = ["--cases", "short", "window", "--implementations", "xla", "--output", str(output)]
    assert main(["bench", "attention", *size, *which]) == 0
    assert "attention · window · 1×64" in capsys.readouterr().out
    lines = json.loads(output.read_text())["results"]
    assert [(line["case"], line["direction"]) for line in lines] == [
        ("short", "forward"), ("short", "both"), ("window", "forward"), ("window", "both"),
    ]  # fmt: skip
    assert all(line["microseconds"] > 0 for line in lines)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["attention", "--cases", "dense"], "--cases: invalid choice: 'dense' .*short"),
        (["attention", "--implementations", "flash"], "--implementations: invalid choice: 'flash' .*mosaic"),
        (["nf4", "--rows", "0"], "--rows: expected a positive integer, got 0"),
        (["generate", "--r", "-1"], "--r: expected a rank, or 0 for no adapters, got -1"),
        (["generate", "--prefill", "8"], "--prefill: expected PROMPTSxTOKENS such as 8x1024, got 8"),
        (["step", "--preset", "gpt-2"], "--preset: invalid choice: 'gpt-2' .*llama3-8b"),
        (["gemm"], "invalid choice: 'gemm' .*attention"),
    ],
)
def test_other_arguments_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["bench", *arguments])
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("what", ["attention", "gated_delta", "nf4", "lora", "loss", "moe", "step", "generate"])
def test_help_says_every_option_and_its_default(what, capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["bench", what, "--help"])
    out = capsys.readouterr().out
    assert f"fastjax bench {what}" in out and "--output FILE" in out and "(default: " in out
