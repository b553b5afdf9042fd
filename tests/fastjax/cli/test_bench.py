"""`fastjax bench` on tiny sizes: every figure is there, and plausible."""

import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest

import fastjax
from fastjax.bench import step
from fastjax.bench.step import PRESETS, StepCase, measure
from fastjax.cli import main
from fastjax.models.config import ModelConfig


def test_step_in_its_own_process(tmp_path, capsys):
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


def test_a_device_without_enough_memory_is_a_result(monkeypatch):
    def exhausted(case, device):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate")

    monkeypatch.setattr(step, "_measure", exhausted)
    assert measure(StepCase("tiny", 1, 8, 4, "full", "scan", None, 1, 1)).error == "out of memory"


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_models(preset):
    config = ModelConfig.from_hf(PRESETS[preset])
    assert config.tie_word_embeddings == (preset == "llama1b")


def test_nf4(tmp_path, capsys):
    output = tmp_path / "nf4.json"
    size = ["--shape", "64", "128", "--dtypes", "float32", "--dtype", "float32", "--rows", "4"]
    assert main(["bench", "nf4", *size, "--rounds", "2", "--cold_bytes", "8192", "--output", str(output)]) == 0
    assert "NF4 · 64×128" in capsys.readouterr().out
    lines = json.loads(output.read_text())["results"]
    found = {(line["operation"], line["implementation"]) for line in lines}
    assert {("copy", "xla"), ("decode", "xla"), ("product", "xla"), ("product", "dense")} <= found
    assert all(line["microseconds"] > 0 for line in lines)


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
