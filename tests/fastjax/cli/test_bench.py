"""`fastjax bench` on tiny sizes: every figure is there, and plausible."""

import concurrent.futures
import json
import os
import re
from pathlib import Path

import jax
import numpy as np
import pytest

import fastjax
from convert.model.config import ModelConfig
from fastjax.bench import step
from fastjax.bench.step import PRESETS, StepCase, measure
from fastjax.cli import main


def test_step_in_its_own_process(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    output = tmp_path / "step.json"
    size = ["--preset", "tiny", "--batch", "2", "--seq", "32", "--rank", "4", "--steps", "2", "--warmup", "1"]
    assert main(["bench", "step", *size, "--checkpointing", "full", "--output", str(output)]) == 0
    out = capsys.readouterr().out
    assert "QLoRA step · tiny · 2×32 · r=4" in out
    (row,) = json.loads(output.read_text())
    assert (row["checkpointing"], row["layer_loop"], row["dtype"]) == ("full", "scan", "float32")
    assert row["tokens_per_second"] == pytest.approx(64 / row["step_seconds"])
    assert row["compile_seconds"] > 0
    assert row["step_bytes"] > 0
    assert row["error"] is None
    # Random weights and tokens, a vocabulary of 512: the loss starts near its logarithm and falls on the same batch.
    assert row["losses"][0] == pytest.approx(np.log(512), rel=0.1)
    assert row["losses"][-1] < row["losses"][0]
    assert len(row["losses"]) == 3


class Here(concurrent.futures.Executor):
    """Runs what it is given at once, in this process."""

    def __init__(self, *args, **kwargs):
        pass

    def submit(self, function, *args):
        future = concurrent.futures.Future()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def test_step_of_packed_rows_with_a_forced_attention(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(step.concurrent.futures, "ProcessPoolExecutor", Here)
    lengths, output = tmp_path / "lengths.txt", tmp_path / "step.json"
    lengths.write_text("20\n10\n32\n7\n24\n32\n")
    size = ["--preset", "tiny", "--batch", "2", "--seq", "32", "--rank", "4", "--steps", "2", "--warmup", "1"]
    given = [*size, "--checkpointing", "full", "--lengths", str(lengths), "--output", str(output)]
    assert main(["bench", "step", *given, "--attention", "xla"]) == 0
    assert "tiny · 2×32 packed" in capsys.readouterr().out
    (row,) = json.loads(output.read_text())
    assert row["attention"] == "xla" and row["losses"][-1] < row["losses"][0]
    assert 2 * 28 < row["tokens_per_second"] * row["step_seconds"] <= 2 * 32  # padding is not counted
    with pytest.raises(NotImplementedError, match="'mosaic' cannot serve"):
        main(["bench", "step", *given, "--attention", "mosaic"])


def test_a_device_without_enough_memory_is_a_result(monkeypatch):
    def exhausted(case, device):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate")

    monkeypatch.setattr(step, "_measure", exhausted)
    assert measure(StepCase("tiny", 1, 8, 4, "full", "scan", None, 1, 1)).error == "out of memory"


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_models(preset):
    config = ModelConfig.from_hf(PRESETS[preset])
    assert config.tie_word_embeddings == (preset == "llama1b")


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


def test_nf4(tmp_path, capsys):
    output = tmp_path / "nf4.json"
    size = ["--shape", "64", "128", "--dtypes", "float32", "--dtype", "float32", "--rows", "4"]
    assert main(["bench", "nf4", *size, "--rounds", "2", "--cold_bytes", "8192", "--output", str(output)]) == 0
    assert "NF4 · 64×128" in capsys.readouterr().out
    lines = json.loads(output.read_text())["results"]
    found = {(line["operation"], line["implementation"]) for line in lines}
    assert {("copy", "xla"), ("decode", "xla"), ("product", "xla"), ("product", "dense")} <= found
    assert all(line["microseconds"] > 0 for line in lines)


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
