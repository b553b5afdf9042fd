"""The report: what it finds in the rows, what stands in the page, and that nothing in it can end a run."""

import dataclasses
import io
import json
import math
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from fastjax.parallel import MeshShape
from fastjax.training.config import DataSection, ModelSection, OptimizerConfig, OutputSection, TrainConfig
from fastjax.training.metrics import Evaluation, JsonLines
from fastjax.training.report import (
    default_settings,
    describe_environment,
    describe_peaks,
    environment,
    usage_of_run,
    write_report,
)
from fastjax.training.report.charts import MOST_POINTS, describe_chart, render_page, thinned
from fastjax.training.report.facts import headline, list_evaluations, list_events, show_loss
from fastjax.training.report.history import History, Spike, find_spikes, smooth
from fastjax.training.report.panels import panels
from fastjax.training.report.settings import list_settings
from tests.support import tiny
from tests.support.family_mixtures import MIXTURES
from tests.support.pages import check_self_contained, embedded_charts

CONFIG = TrainConfig(
    ModelSection("path/to/base", full_finetuning=False),
    DataSection("<script>alert(1)</script>.jsonl"),
    OutputSection("runs/x", run_name="a <b>run</b>"),
    optimizer=OptimizerConfig(learning_rate=1e-3),
)


def rows(steps: int, **changes) -> list[dict]:
    """A loss that falls with some noise, and an evaluation in the middle and at the end."""
    noise = np.random.default_rng(0).normal(size=steps + 1) * 0.05
    found = []
    for step in range(1, steps + 1):
        row = {
            "step": step,
            "loss": 1 + math.exp(-step / 30) + noise[step],
            "grad_norm": 0.5 + abs(noise[step]),
            "learning_rate": 1e-3 * (1 - step / steps),
            "token_accuracy": 0.5,
            "num_tokens": 1000,
            "epoch": step / 40,
            "tokens_per_second": None if step == 1 else 2000.0,
            "model_flops_utilization": None if step == 1 else 0.4,
            "memory_bytes": 3 * 2**30,
            "seconds": step * 0.5,
        }
        found.append(row | {name: change(step) for name, change in changes.items()})
        if step in (steps // 2, steps):
            found.append(Evaluation(1.5 if step < steps else 1.6, 0.6, 100).row(step) | {"eval_exact": 0.25})
    return found


def report(folder, found: list[dict], status: str = "finished"):
    sink = JsonLines(folder / "metrics.jsonl")
    for row in found:
        sink.write(row)
    sink.close()
    return write_report(
        folder,
        config=dataclasses.asdict(CONFIG),
        statistics={"train": "3 examples & more"},
        environment={"device": "NVIDIA H200"},
        result=usage_of_run(CONFIG, folder / "adapter", {"dtype": "bfloat16"}, "bfloat16").blocks,
        status=status,
        console=Console(stderr=True),
    )


# Spikes


def test_spikes_are_found():
    history = History.from_rows(rows(200))
    steps, losses = history.steps["step"], history.steps["loss"]
    assert find_spikes(steps, losses) == []
    losses[[100, 101, 102, 150]] = [3.0, 4.0, 3.5, 2.5]
    losses[120] = np.nan
    first, second = find_spikes(steps, losses)
    assert first == Spike(102, 4.0, first.expected, 3)
    assert second == Spike(151, 2.5, second.expected, 1)
    assert first.expected == float(np.median(losses[50:100]))


def test_ripples_of_an_even_loss_and_the_first_steps_are_no_spikes():
    losses = np.full(100, 1.0)
    losses[::9] += 0.1  # within six times 2%
    losses[5] = 9.0
    assert find_spikes(np.arange(1.0, 101.0), losses) == []
    losses[60] = 1.13
    assert [spike.step for spike in find_spikes(np.arange(1.0, 101.0), losses)] == [61]


# History


def test_the_later_row_of_a_step_counts():
    found = [*rows(4), {"step": 4, "event": "resumed", "message": "m"}, rows(4)[3] | {"loss": 7.0}]
    history = History.from_rows(found)
    assert history.steps["step"].tolist() == [1, 2, 3, 4]
    assert history.steps["loss"][2] == 7.0
    assert len(history.events) == 1
    assert history.best is not None
    assert history.best["step"] == 2
    assert history.own_metrics == ["eval_exact"]


@pytest.mark.parametrize(("seconds", "total"), [([1, 2, 3], 3), ([10, 20, 1, 5, 2, 3], 28), ([], 0), ([4], 4)])
def test_time_over_resumptions(seconds, total):
    history = History.from_rows([{"step": n, "loss": 1.0, "seconds": float(s)} for n, s in enumerate(seconds)])
    assert history.seconds == total


def test_smoothing_ignores_spikes_and_gaps():
    values = np.array([1.0, 1.0, 9.0, np.nan, 1.0, 1.0, np.inf])
    np.testing.assert_array_equal(smooth(values, 3)[:3], [1.0, 1.0, 5.0])
    np.testing.assert_array_equal(smooth(values, 5), [1, 1, 1, 1, 1, 1, 1])
    assert np.isnan(smooth(np.full(3, np.nan), 3)).all()


def test_headline():
    facts = {fact.label: (fact.value, fact.note) for fact in headline(History.from_rows(rows(80)))}
    assert facts["steps"] == ("80", "2 epochs")
    assert facts["best held-out loss"] == ("1.5000", "step 40, perplexity 4.48")
    assert facts["throughput"][0] == "2,000"
    assert facts["MFU"][0] == "40.0%"
    assert facts["peak memory"][0] == "3.0 GiB"
    assert facts["time"] == ("0:00:40", "80 k tokens")
    assert "skipped steps" not in facts


def test_small_losses_have_digits():
    assert [show_loss(loss) for loss in (12.345678, 0.1, 0.00048124)] == ["12.3457", "0.1000", "0.000481"]


def test_lists_are_short():
    saved = [{"step": step, "event": "saved", "message": f"saved {step}"} for step in range(1, 51)]
    other = [{"step": step, "event": "save_failed", "message": "disk full"} for step in range(100, 160)]
    events = list_events(History.from_rows(saved + other))
    assert events["rows"][0]["message"] == "saved 50 (50 checkpoints in all)"
    assert (len(events["rows"]), events["hidden"]) == (20, 41)
    evaluated = [Evaluation(2.0 - (step == 7), 0.5, 1).row(step) for step in range(1, 101)]
    table = list_evaluations(History.from_rows(evaluated))
    assert table is not None
    assert [row["cells"][0] for row in table["rows"]] == ["1", "7", *map(str, range(91, 101))]
    assert [row["cells"][0] for row in table["rows"] if row["best"]] == ["7"]
    assert table["hidden"] == 88


# Plots


def test_the_loss_panel():
    found = rows(200)
    found[99]["loss"], found[120]["loss"] = 50.0, float("nan")
    found.append({"step": 90, "event": "saved", "message": "m"})
    found.append({"step": 120, "event": "resumed", "message": "m"})
    history = History.from_rows(found)
    spikes = find_spikes(history.steps["step"], history.steps["loss"])
    drawn = panels(history, spikes, 1.0)
    assert [panel.title.split(" (")[0].split(",")[0] for panel in drawn] == [
        "Loss",
        "Gradient norm",
        "Learning rate",
        "Token accuracy",
        "Tokens a second",
        "Model FLOPs utilisation",
        "Device memory",
        "Held out: exact",
    ]
    lines = {series.label.split(" (median")[0]: list(series.x) for series in drawn[0].series}
    assert lines["held out"] == [100, 200]
    assert lines["best held out"] == [100]
    assert lines["spike (1)"] == [100]
    assert lines["not finite"] == [120]
    assert lines["checkpoint"] == [90]
    assert set(lines["stopped, resumed"]) == {120}
    assert drawn[0].limits[1] is not None and drawn[0].limits[1] < 3  # the spike does not flatten the curve
    assert [text for _, _, text in drawn[0].labels] == ["50"]


@pytest.mark.parametrize(("factor", "scale"), [(1.0, None), (20.0, "log")])
def test_a_loss_that_falls_far_is_shown_by_its_logarithm(factor, scale):
    history = History.from_rows(rows(200, loss=lambda step: math.exp(-step * factor / 200)))
    axis = describe_chart(panels(history._replace(evaluations=[]), [])[0], history.extent)["layout"]["yaxis"]
    assert axis.get("type") == scale
    low, high = axis["range"] if scale is None else (10**limit for limit in axis["range"])
    assert 0 <= low < math.exp(-factor)
    assert 4 > high > math.exp(-factor * 3 / 200)


def test_the_loss_scale_panel():
    found = rows(60, loss_scale=lambda step: 2.0 ** (16 - (step > 3)), skipped=lambda step: step == 3)
    history = History.from_rows(found)
    (panel,) = [panel for panel in panels(history, []) if panel.title.startswith("Loss scale")]
    (skipped,) = [series for series in panel.series if series.label.startswith("skipped")]
    assert (list(skipped.x), list(skipped.y)) == ([3], [65536])
    assert "steps skipped" not in str(list_events(history)["rows"])
    assert list_events(history)["rows"][0]["message"] == "1 step skipped, the gradient overflowed in float16: 3"


# The page


def test_report(tmp_path):
    found = rows(120)
    found[79]["loss"] = 12.5
    found.append({"step": 120, "event": "interrupted", "message": "<img src=x onerror=alert(2)>"})
    page = report(tmp_path, found, "interrupted at step 120")
    assert page == tmp_path / "report.html"
    html = page.read_text(encoding="utf-8")
    assert "<script>alert" not in html
    assert "&lt;script&gt;alert(1)" in html
    assert "<h1>a &lt;b&gt;run&lt;/b&gt;</h1>" in html
    assert "&lt;img src=x onerror=alert(2)&gt;" in html
    check_self_contained(html)
    charts = {chart["title"]: chart for chart in embedded_charts(html)}
    assert len(charts) == 8
    loss = {trace["name"]: trace for trace in charts["Loss (nats)"]["traces"]}
    history = History.from_rows(found)
    assert loss["training"]["x"] == list(range(1, 121))
    np.testing.assert_allclose(loss["training"]["y"], history.steps["loss"], rtol=1e-5)
    assert (loss["held out"]["x"], loss["held out"]["y"]) == ([60, 120], [1.5, 1.6])
    (spike,) = find_spikes(history.steps["step"], history.steps["loss"])
    assert loss["spike (1)"]["text"] == [f"spike: 12.5, expected {spike.expected:.4g}"]
    speeds = [charts[title]["traces"][0]["y"][:2] for title in ("Tokens a second", "Model FLOPs utilisation")]
    assert speeds == [[None, 2000], [None, 0.4]]
    assert len(html) < 2_500_000
    assert '<span class="status bad">interrupted at step 120</span>' in html
    assert '<td class="number">79</td><td class="number">12.5000</td>' in html
    assert "optimizer.learning_rate" in html.partition("settings are as by default")[0]
    assert "optimizer.adam_beta2" in html.partition("settings are as by default")[2]
    assert "fastjax generate --model path/to/base --adapter" in html
    assert "3 examples &amp; more" in html
    assert "The best is in bold" in html
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "report.html"]


@pytest.mark.parametrize(
    "found",
    [
        [],
        rows(1)[:1],
        [{"step": n, "loss": float("nan"), "learning_rate": 0.0, "grad_norm": float("inf")} for n in (1, 2)],
        [{"step": 0, "eval_loss": 2.0}, {"step": 3, "event": "saved", "message": "m"}],
        [{"step": 1, "loss": 0.0, "grad_norm": 0.0, "learning_rate": 0.0, "tokens_per_second": 0.0}],
    ],
    ids=["no rows", "one step", "nothing finite", "no steps", "zeros"],
)
def test_report_of_little(tmp_path, found, capsys):
    assert report(tmp_path, found) is not None, capsys.readouterr().err
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "finished" in html
    assert "The best is in bold" not in html  # of one evaluation there is no best


def test_a_failing_report_is_a_warning(tmp_path):
    file = io.StringIO()
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "run"
    console = Console(file=file, width=40)
    arguments = {"config": {}, "statistics": {}, "environment": {}, "result": [], "status": "finished"}
    assert write_report(folder, **arguments, console=console) is None
    assert file.getvalue().startswith(f"warning: no report in {folder}: ")
    assert file.getvalue().count("\n") == 1


def test_long_lines_are_thinned_to_their_extremes():
    steps, values = np.arange(50_000.0), np.zeros(50_000)
    values[[7, 31_111]], values[40_000] = (5.0, -3.0), np.nan
    x, y = thinned(steps, values)
    assert len(x) <= MOST_POINTS and (np.diff(x) > 0).all()
    assert {(7.0, 5.0), (31_111.0, -3.0)} <= set(zip(x, y, strict=True))
    assert thinned(steps[:9], values[:9])[0].tolist() == list(range(9))


def test_names_of_metrics_are_no_markup():
    found = [Evaluation(2.0, 0.5, 1, {"eval_</script><b>": 0.5}).row(step) for step in (1, 2)]
    (panel,) = [panel for panel in panels(History.from_rows(found), []) if panel.title.startswith("Held out")]
    assert describe_chart(panel, (0, 2))["traces"][0]["name"] == "Held out: &lt;/script&gt;&lt;b&gt;"
    page = render_page("frame.html.jinja", [panel], (0, 2))
    assert "</script><b>" not in page
    assert embedded_charts(page)[0]["title"] == panel.title


# Settings and surroundings


def test_settings():
    settings = list_settings(dataclasses.asdict(CONFIG), default_settings())
    changed = {setting.name: (setting.value, setting.default) for setting in settings if setting.changed}
    assert changed == {
        "model.model_name": ("path/to/base", ""),
        "data.train": ("<script>alert(1)</script>.jsonl", ""),
        "output.output_dir": ("runs/x", ""),
        "output.run_name": ("a <b>run</b>", "null"),
        "optimizer.learning_rate": ("0.001", "0.0002"),
    }
    assert settings[: len(changed)] == [setting for setting in settings if setting.changed]
    assert len(settings) == sum(len(section) for section in dataclasses.asdict(CONFIG).values())


def test_usage(tmp_path):
    ways = usage_of_run(CONFIG, tmp_path / "my adapter", {"dtype": "bfloat16", "model_type": "llama"}, "bfloat16")
    folder = f"'{tmp_path}/my adapter'"
    merged, file = f"'{tmp_path}/my adapter-merged'", f"{tmp_path}/my adapter-merged-q8_0"
    assert ways.own.splitlines() == [
        f"fastjax chat {folder}",
        f"fastjax serve --model path/to/base --adapter {folder} --load_in_4bit",
        f"fastjax generate --model path/to/base --adapter {folder} --load_in_4bit --prompt '…'",
    ]
    assert ways.servers.splitlines() == [
        f"fastjax convert merge path/to/base {folder} {merged} --base_in_nf4  # for all of the following",
        f"vllm serve {merged}",
        f"fastjax convert gguf {merged} '{file}.gguf' --type q8_0",
        f"llama-server -m '{file}.gguf' --jinja",
        f"ollama create a-b-run-b -f '{file}.Modelfile' && ollama run a-b-run-b",
    ]
    compile(ways.python, "usage", "exec")
    section = ModelSection("base", full_finetuning=True, load_in_4bit=False, dtype="float16")
    ways = usage_of_run(dataclasses.replace(CONFIG, model=section), tmp_path / "model", {}, "float16")
    assert ways.own.splitlines()[-1] == f"fastjax generate --model {tmp_path}/model --dtype float16 --prompt '…'"
    assert ways.servers == f"vllm serve {tmp_path}/model"  # no family that llama.cpp is known to have
    assert "peft" not in ways.python and "AutoTokenizer.from_pretrained" in ways.python
    scaled = ModelSection("base", rope_scaling={"rope_type": "yarn", "factor": 2.0})
    llama = tiny.config() | {"rope_scaling": scaled.rope_scaling, "dtype": "bfloat16"}
    assert usage_of_run(dataclasses.replace(CONFIG, model=scaled), tmp_path / "a", llama, "bfloat16").servers == ""


INT4 = {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"type": "int", "num_bits": 4}}}}


@pytest.mark.parametrize(
    ("changes", "base", "dtype", "expected"),
    [
        ({}, {"dtype": "bfloat16"}, "bfloat16", '("base", quantization_config=settings, dtype="bfloat16")'),
        ({"load_in_4bit": False}, {"dtype": "bfloat16"}, "bfloat16", 'from_pretrained("base")'),
        ({"load_in_4bit": False}, {"torch_dtype": "bfloat16"}, "float32", 'from_pretrained("base", dtype="float32")'),
        ({}, {"dtype": "bfloat16", "quantization_config": {"quant_method": "bitsandbytes"}}, "bfloat16", '("base")'),
        ({}, {"dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}}, "bfloat16", '("base-nf4")'),
        ({}, {"dtype": "bfloat16", "quantization_config": INT4}, "bfloat16", '("base")'),
    ],
)  # fmt: skip
def test_the_base_is_loaded_as_the_run_held_it(changes, base, dtype, expected):
    config = dataclasses.replace(CONFIG, model=ModelSection("base", **changes))
    python = usage_of_run(config, Path("adapter"), base, dtype).python
    (line,) = [line for line in python.splitlines() if line.startswith("model = AutoModel")]
    assert line.endswith(expected)
    assert ("BitsAndBytesConfig(" in python) == ("settings" in expected)
    assert 'tokenizer = AutoTokenizer.from_pretrained("adapter")' in python
    assert ("fastjax convert quantize base base-nf4" in python) == ("base-nf4" in expected)


@pytest.mark.parametrize(
    ("quantization", "dtype", "expected"),
    [
        (None, "float32", "--base_in_nf4 --skip layers.1.self_attn.q_proj"),
        ({"quant_method": "fp8"}, "bfloat16", "--base_in_nf4 --skip layers.1.self_attn.q_proj --dtype bfloat16"),
        ({"quant_method": "mxfp4"}, "float32", ""),
    ],
)
def test_an_adapter_on_a_mixture_in_4_bits_is_merged(quantization, dtype, expected):
    """transformers leaves experts in 16 bits under BitsAndBytesConfig: PEFT's lines would load another model."""
    section = ModelSection("base", float32_modules=["layers.1.self_attn.q_proj", "norm"])
    base = MIXTURES["olmoe"] | ({} if quantization is None else {"quantization_config": quantization})
    python = usage_of_run(dataclasses.replace(CONFIG, model=section), Path("adapter"), base, dtype).python
    assert f"# fastjax convert merge base adapter merged {expected}".rstrip() in python.splitlines()
    assert 'model = AutoModelForCausalLM.from_pretrained("merged")' in python
    assert "peft" not in python and "BitsAndBytes" not in python
    whole = dataclasses.replace(CONFIG, model=ModelSection("base", load_in_4bit=False))
    plain = usage_of_run(whole, Path("a"), base, dtype).python
    assert "PeftModel.from_pretrained" in plain and "merge" not in plain


def test_environment(tmp_path, monkeypatch):
    driver = tmp_path / "version"
    driver.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC version: 12\n"
    )
    monkeypatch.setattr(environment, "_DRIVER", driver)
    monkeypatch.chdir(tmp_path)
    found = describe_environment(MeshShape())
    assert found["device"] == "cpu (device 0, 1 of 8)"
    assert found["idle devices"] == "devices 1 to 7 of 8, since the settings (parallel) take 1"
    assert found["NVIDIA driver"] == "580.95.05"
    assert {"date", "host", "Python", "jax", "flax", "transformers"} <= set(found)
    assert "git commit" not in found
    assert "device memory" not in found
    json.dumps(found)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "version"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "m"], check=True)
    assert re.fullmatch(r"[0-9a-f]{40}", describe_environment(MeshShape())["git commit"])
    driver.write_text("changed")
    assert re.fullmatch(r"[0-9a-f]{40} \+ changes", describe_environment(MeshShape())["git commit"])
    assert "NVIDIA driver" not in describe_environment(MeshShape())


def test_peaks_of_few_devices_are_listed_and_those_of_many_have_bounds():
    gib = 2**30
    assert describe_peaks([gib, 3 * gib // 2]) == "1.0, 1.5 GiB"
    assert describe_peaks([gib] * 10 + [2 * gib, gib]) == "1.0 to 2.0 GiB, most on number 10 of 0 to 11"
