"""`fastjax bench generate` on a tiny model: every figure is there, and the engine computes what training does."""

import json
import os
from types import SimpleNamespace

import pytest

from convert.families.mapping import read_config
from fastjax.bench.generate import measure, peers, run
from fastjax.bench.generate.settings import GenerateSettings
from fastjax.cli import main
from fastjax.errors import TrainingError

GIB = 2**30
SIZE = ["--preset", "tiny", "--rows", "2", "--r", "4", "--context", "12", "--new", "4"]
REQUESTS = ["--requests", "4", "--prompts", "3", "9", "--answers", "2", "5", "--prefill", "2x8"]


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No other library, whatever is installed, and everything in this process."""
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(run, "in_process", lambda function, *arguments: function(*arguments))


def test_every_figure(tmp_path, capsys):
    output = tmp_path / "generate.json"
    given = ["bench", "generate", *SIZE, *REQUESTS]
    assert main([*given, "--output", str(output)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "steady decoding · tiny, NF4 · cpu" in said and "transformers: not installed" in said
    content = json.loads(output.read_text())
    assert content["command"] == f"fastjax {' '.join(given)}" and content["case"]["requests"] == 4
    rows = {row["case"]: row for row in content["results"]}
    assert list(rows) == ["decode", "prefill", "log_probs", "requests"]
    assert {(row["by"], row["r"], row["layer_loop"], row["reason"]) for row in rows.values()} == {
        ("fastjax", 4, "unroll", None)
    }
    decode, served, off = rows["decode"], rows["requests"], rows["log_probs"]
    assert decode["tokens_per_second"] == pytest.approx(2e3 / decode["milliseconds"])
    assert 11 <= decode["context"] <= 13 and decode["compilations"] == 0
    assert off["tokens"] == 8 and 0 < off["mean"] <= off["largest"] < 1e-5, "float32, adapters included"
    assert served["compilations"] == 0, "the engine has compiled its programs before"
    prompts, answers = served["prompt_tokens"], served["admitted_tokens"]
    alone = prompts / rows["prefill"]["tokens_per_second"] + answers / decode["tokens_per_second"]
    assert served["over_alone"] == pytest.approx(served["admitted_seconds"] / alone)
    assert 4 * 3 <= prompts <= 4 * 9 and 4 * 2 <= served["tokens"] <= 4 * 5


@pytest.mark.parametrize(
    ("stats", "given", "expected"),
    [
        (None, None, None),
        ({"bytes_limit": 20 * GIB, "bytes_in_use": 7 * GIB}, None, 10 * GIB // 2**17),
        ({"bytes_limit": 70 * GIB, "bytes_in_use": 7 * GIB}, None, None),  # 60 rows of 3,072 take 22.5 GiB
        ({"bytes_limit": 20 * GIB, "bytes_in_use": 7 * GIB}, 9000, 9000),
    ],
)
def test_the_cache_of_requests_fits_beside_the_model(stats, given, expected, monkeypatch):
    settings = GenerateSettings("llama3-8b", tokens=given)
    model = SimpleNamespace(config=read_config(settings.hf_config), dtype="bfloat16")
    monkeypatch.setattr(measure.jax, "devices", lambda: [SimpleNamespace(memory_stats=lambda: stats)])
    assert measure._Bench(settings, model, None)._room(60, 3072, None) == expected


def test_settings_that_do_not_fit(capsys):
    assert main(["bench", "generate", *SIZE, "--new", "12"]) == 2
    assert "--new: expected fewer than --context 12, got 12" in capsys.readouterr().err
    assert main(["bench", "generate", *SIZE, "--answers", "9", "2"]) == 2
    assert "--answers: expected the fewest tokens first, got 9 2" in capsys.readouterr().err
    assert main(["bench", "generate", "--preset", "tiny", "--layers", "99"]) == 2
    assert "--layers: expected at most the 2 of tiny, got 99" in capsys.readouterr().err


def test_a_case_without_a_figure(monkeypatch, capsys):
    row = {"case": "decode", "rows": 2, "r": 4, "layer_loop": "scan", "cache_dtype": None, "device": "cpu", "jax": "1"}
    monkeypatch.setattr(run, "in_process", lambda *given: iter([{**row, "reason": "out of memory"}]))
    assert main(["bench", "generate", *SIZE]) == 1
    said = capsys.readouterr()
    assert "fastjax decode 2 rows r=4 scan: out of memory" in said.out and "1 of 1 cases gave no figure" in said.err


def numbers(count):
    """Rows that a process of its own yields before it ends."""
    yield {"number": count}
    os._exit(3)


@pytest.mark.exhaustive(by="test_every_figure")
def test_a_process_that_ends(monkeypatch):
    monkeypatch.undo()
    rows = run.in_process(numbers, 7)
    assert next(rows) == {"number": 7}
    with pytest.raises(TrainingError, match="its process ended with status 3"):
        next(rows)
