"""`fastjax compare`: what its page holds of each run, the settings that differ, and what it refuses."""

import re

import yaml

from fastjax.cli import main
from fastjax.training.metrics import Evaluation, JsonLines
from tests.support.pages import check_self_contained, embedded_charts


def run(folder, steps: int, *, learning_rate: float = 1e-3, name: str | None = None, again: int = 0, **model) -> str:
    """A run's folder: its loss is 1 / step, over which `again` last steps are 9 before they are repeated."""
    folder.mkdir()
    sink = JsonLines(folder / "metrics.jsonl")
    losses = [(step, 9.0 if step > steps - again else 1 / step) for step in range(1, steps + 1)]
    for step, loss in [*losses, *((step, 1 / step) for step in range(steps - again + 1, steps + 1))]:
        row = {"step": step, "loss": loss, "learning_rate": learning_rate, "memory_bytes": 2**30}
        sink.write({**row, "tokens_per_second": 100.0 * steps, "model_flops_utilization": None})
    sink.write(Evaluation(0.5, 0.5, 10).row(steps))
    sink.close()
    settings = {
        "model": {"model_name": "base", **model},
        "optimizer": {"learning_rate": learning_rate},
        "output": {"output_dir": str(folder), "run_name": name},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return str(folder)


def test_runs_in_one_page(tmp_path, capsys):
    hostile = "</script><b>x"
    folders = [run(tmp_path / "a", 5, dtype=None)]
    folders.append(run(tmp_path / "b", 9, learning_rate=2e-3, name=hostile, again=3, dtype=hostile))
    (tmp_path / "c").mkdir()
    folders.append(run(tmp_path / "c" / "a", 3))
    (tmp_path / "c" / "a" / "config.yaml").unlink()
    assert main(["compare", *folders, "--output", str(tmp_path / "new" / "page.html")]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^steps +5 +9 +3$", out, re.MULTILINE)
    assert "settings that differ: model.dtype, optimizer.learning_rate\n" in out
    page = (tmp_path / "new" / "page.html").read_text(encoding="utf-8")
    check_self_contained(page)
    assert "<b>x" not in page
    charts = {chart["title"]: chart for chart in embedded_charts(page)}
    assert list(charts) == [
        "Training loss (nats)",
        "Held-out loss (nats)",
        "Learning rate",
        "Held-out token accuracy",
        "Tokens a second",
        "Device memory, peak so far (GiB)",
    ]
    loss = charts["Training loss (nats)"]
    names = [folders[0], "&lt;/script&gt;&lt;b&gt;x", folders[2]]  # two folders have one name
    assert [trace["name"] for trace in loss["traces"]] == names
    assert [trace["legendgroup"] for trace in charts["Tokens a second"]["traces"]] == names
    assert [len(trace["x"]) for trace in loss["traces"]] == [5, 9, 3]
    assert loss["traces"][1]["y"][-3:] == [0.142857, 0.125, 0.111111]  # of a step that was repeated, the later row
    assert loss["layout"]["xaxis"]["range"] == [0, 9.09]
    assert len({trace["meta"] for trace in loss["traces"]}) == 3
    differing = page.partition("Settings in which they differ")[2]
    assert re.findall(r"<code>(.+?)</code>", differing) == [
        *("model.dtype", "null", "&lt;/script&gt;&lt;b&gt;x"),
        *("optimizer.learning_rate", "0.001", "0.002"),
    ]
    assert f"The settings of <b>{folders[2]}</b> are unknown" in differing


def test_what_is_no_run_is_refused(tmp_path, capsys):
    good = run(tmp_path / "good", 1)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "metrics.jsonl").write_text('{"step": 0, "event": "started", "message": "m"}\n')
    for folder, message in [
        ("none", "{}: expected a run's output folder, with metrics.jsonl, got no such folder"),
        ("empty", "{}: expected a run's output folder, with metrics.jsonl, got one without"),
        ("file", "{}: expected a run's output folder, with metrics.jsonl, got a file"),
        ("begun", "{}/metrics.jsonl: expected a run with at least one train step, got none"),
        ("good/../good", "{}: expected every run once, got the folder " + good + " again"),
    ]:
        page = tmp_path / "page.html"
        assert main(["compare", good, str(tmp_path / folder), "--output", str(page)]) == 2
        message = message.format(tmp_path / folder)
        assert capsys.readouterr().err == f"fastjax compare: error: {message}\n"
        assert not page.exists()
    assert main(["compare", good, "--output", good]) == 2
    assert capsys.readouterr().err == f"fastjax compare: error: --output: expected a file, got the folder {good}\n"


def test_many_runs_look_different(tmp_path):
    folders = [run(tmp_path / f"run{number}", 2) for number in range(7)]
    assert main(["compare", *folders, "--output", str(tmp_path / "page.html")]) == 0
    (loss, *others) = embedded_charts((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert len({(trace["meta"], trace["line"]["dash"]) for trace in loss["traces"]}) == 7
    assert [chart["layout"]["showlegend"] for chart in others] == [chart["wide"] for chart in others]
    assert "None, but for their folders and names." in (tmp_path / "page.html").read_text(encoding="utf-8")
