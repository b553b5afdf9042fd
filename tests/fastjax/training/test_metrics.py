"""Rows in a file that survives being killed, and what is measured of a run."""

import json
import math

import jax
import pytest

from fastjax.training.metrics import Evaluation, JsonLines, Throughput, peak_memory, read_rows


def test_json_lines_are_json(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    lines.write({"step": 1, "loss": float("nan"), "tokens_per_second": None})
    assert json.loads(path.read_text()) == {"step": 1, "loss": None, "tokens_per_second": None}
    lines.close()
    JsonLines(path).close()
    assert path.read_text() == ""


def test_json_lines_go_on_from_a_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    for step in (1, 2, 3):
        lines.write({"step": step, "loss": float(step)})
        lines.write({"step": step, "event": "saved", "message": "ä"})
    lines.close()
    with open(path, "ab") as file:
        file.write('{"step": 4, "message": "ä'.encode()[:-1])  # killed in the middle of a character
    lines = JsonLines(path, resume_step=2)
    lines.write({"step": 3, "loss": 30.0})
    lines.close()
    assert [(row["step"], row.get("loss")) for row in read_rows(path)] == [
        (1, 1.0),
        (1, None),
        (2, 2.0),
        (2, None),
        (3, 30.0),
    ]
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 1, 2, 2, 3]
    assert list(tmp_path.iterdir()) == [path]


def test_json_lines_go_on_without_a_file(tmp_path):
    lines = JsonLines(tmp_path / "metrics.jsonl", resume_step=5)
    lines.write({"step": 6})
    lines.close()
    assert read_rows(tmp_path / "metrics.jsonl") == [{"step": 6}]
    assert read_rows(tmp_path / "none.jsonl") == []


def test_rows_are_objects_with_a_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('[1]\n{"loss": 1}\n{"step": "1"}\nnull\n\n{"step": 1}\n')
    assert read_rows(path) == [{"step": 1}]


def test_throughput_leaves_out_compilation_and_evaluation():
    times = iter([0.0, 30.0, 32.0, 34.0, 100.0, 102.0])
    throughput = Throughput(10, memory=lambda: None, clock=lambda: next(times))
    assert throughput.step(1, 100) == {
        "num_tokens": 100,
        "epoch": None,
        "tokens_per_second": None,
        "model_flops_utilization": None,
        "memory_bytes": None,
        "seconds": 30.0,
        "seconds_left": None,
    }
    second = throughput.step(2, 100)
    assert (second["tokens_per_second"], second["seconds"], second["seconds_left"]) == (50.0, 32.0, 16.0)
    assert throughput.step(3, 300)["tokens_per_second"] == 100.0
    throughput.pause()
    assert throughput.step(4, 100)["tokens_per_second"] == 100.0
    assert throughput.step(5, 200)["seconds_left"] == 10.0


def test_throughput_of_a_resumed_run():
    times = iter([1000.0, 1001.0, 1003.0])
    throughput = Throughput(
        20,
        steps_per_epoch=8,
        flops_per_token=6e9,
        peak_flops=1e12,
        memory=lambda: 2**30,
        seconds_before=50.0,
        clock=lambda: next(times),
    )
    throughput.step(11, 100)
    row = throughput.step(12, 100)
    assert row["model_flops_utilization"] == 100 * 6e9 / 2 / 1e12
    assert (row["epoch"], row["memory_bytes"], row["seconds"], row["seconds_left"]) == (1.5, 2**30, 53.0, 16.0)


@pytest.mark.parametrize("unknown", ["flops_per_token", "peak_flops"])
def test_no_utilization_without_both_figures(unknown):
    times = iter([0.0, 1.0, 2.0])
    known = {"flops_per_token": 6e9, "peak_flops": 1e12} | {unknown: None}
    throughput = Throughput(3, clock=lambda: next(times), **known)  # pyright: ignore[reportArgumentType]
    throughput.step(1, 100)
    assert throughput.step(2, 100)["model_flops_utilization"] is None


def test_peak_memory():
    class Device:
        def __init__(self, stats):
            self.memory_stats = lambda: stats

    assert peak_memory() is None  # a CPU
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "local_devices", lambda: [Device({"peak_bytes_in_use": n}) for n in (3, 5)] + [Device(None)])
        assert peak_memory() == 5


def test_evaluation_row():
    row = Evaluation(1e9, 0.25, 8).row(7)
    assert row["step"] == 7
    assert row["eval_num_targets"] == 8
    json.dumps(row, allow_nan=False)  # a hopeless loss is a large perplexity, not an overflow


def test_an_evaluation_is_read_back():
    found = Evaluation(1.5, 0.25, 8, {"eval_exact": 0.5})
    assert Evaluation.from_row(json.loads(json.dumps(found.row(7)))) == found
    row = {"step": 7, "eval_loss": None, "eval_perplexity": None, "eval_token_accuracy": 0.0, "eval_num_targets": 8}
    back = Evaluation.from_row(row | {"eval_own": None})
    assert math.isnan(back.loss) and back.num_targets == 8 and list(back.extra) == ["eval_own"]
