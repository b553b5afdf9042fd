"""The quickstart: it asks, trains, asks again, shows all that and says where the adapter is; and it learns its task."""

import dataclasses
import html
import io
import json

import numpy as np
import pytest
from rich.console import Console

from fastjax.commands.quickstart import ASSETS, Scored, quickstart_config, run
from fastjax.errors import Interrupted
from tests.support.folders import read_adapter


def test_assets_are_small():
    files = {path for path in ASSETS.rglob("*") if path.is_file()}
    data = {"tiny-chat", "tiny-text", "tiny-answers", "tiny-pairs"}
    assert {path.parent.name for path in files} == {"tiny-llama", "chat_templates", *data}
    assert sum(path.stat().st_size for path in (ASSETS / "tiny-llama").iterdir()) <= 4_000_000


def quickstart(folder, prompts: int, steps: int):
    """Its answers before and after, to some of the prompts, and what it shows."""
    held_out = folder / "held_out.jsonl"
    lines = (ASSETS / "tiny-chat" / "test.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    held_out.write_text("".join(lines[:prompts]), encoding="utf-8")
    config = quickstart_config(str(folder / "run"))
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, eval=str(held_out)),
        training=dataclasses.replace(config.training, max_steps=steps),
    )
    shown = io.StringIO()
    before, after = run(config, Console(file=shown, width=100))
    return before, after, shown.getvalue()


def test_it_shows_its_answers_and_its_adapter(tmp_path):
    before, after, text = quickstart(tmp_path, prompts=2, steps=2)
    assert before.answers != after.answers and before.exact == 0
    assert f"exact match on 2 held-out prompts: before 0.0%, after {after.exact / 2:.1%}" in text
    assert "step 2/2: loss" in text and "asking the base model 2 held-out prompts …" in text
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert page.count("before training</div>") == page.count("after training</div>") == 2
    asked = [json.loads(line)["messages"] for line in (tmp_path / "held_out.jsonl").read_text("utf-8").splitlines()]
    assert page.index("Sample answers") < page.index(html.escape(asked[1][1]["content"]).replace("&quot;", "&#34;"))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    first, last = [row["samples"] for row in map(json.loads, lines) if row.get("event") == "answered"]
    assert [sample["prompt"] for sample in first] == [sample["prompt"] for sample in last] and first != last
    for sample, (question, right), said in zip(last, asked, after.answers, strict=True):
        assert question["content"] in sample["prompt"] and sample["expected"] == right["content"]
        both = min(len(sample["answer"]), len(said))
        assert both and sample["answer"][:both] == said[:both]
    shown = " ".join(text.split())
    for name, answers in (("before", before.answers), ("after", after.answers)):
        assert f"{name} {' '.join(answers[0].split())[:40]}" in shown
    assert f"fastjax chat {tmp_path}/run" in text and "'Record: " in text
    adapter, arrays = read_adapter(tmp_path / "run" / "adapter")
    assert adapter.r == 16 and any(np.any(array != 0) for name, array in arrays.items() if name.endswith("lora_B"))


def test_an_interrupted_one_says_how_to_go_on(monkeypatch):
    def stopped(config, console):
        raise Interrupted("its state is saved, and --resume goes on", 15)

    monkeypatch.setattr("fastjax.runs.fine_tune.fine_tune", stopped)
    monkeypatch.setattr("fastjax.commands.quickstart._score", lambda *given: Scored([], 0))
    with pytest.raises(Interrupted) as error:
        run(quickstart_config("my runs"), Console(file=io.StringIO()))
    assert str(error.value).endswith("goes on: fastjax train 'my runs/config.yaml' --resume")
    assert error.value.signal_number == 15


# That a run with the same settings learns the task within its first steps is seen in a notebook.
@pytest.mark.optimized
@pytest.mark.exhaustive(by="test_it_shows_its_answers_and_its_adapter, tests/fastjax/test_notebooks.py::test_it_runs")
def test_it_learns_its_task(tmp_path):
    """A little more than half of it."""
    before, after, text = quickstart(tmp_path, prompts=16, steps=80)
    assert before.exact == 0
    assert after.exact >= 14, after.answers  # 16 after the whole run of 142 steps, which ends early
    assert f"before 0.0%, after {after.exact / 16:.1%}" in text
