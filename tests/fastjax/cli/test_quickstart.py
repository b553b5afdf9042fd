"""The quickstart, a little more than half of it: it learns the task, shows it, and says where the adapter is."""

import dataclasses
import io

import pytest
from rich.console import Console

from convert.adapters import read_adapter
from fastjax.commands.quickstart import ASSETS, quickstart_config, run


def test_assets_are_small():
    files = {path for path in ASSETS.rglob("*") if path.is_file()}
    data = {"tiny-chat", "tiny-text", "tiny-answers", "tiny-pairs"}
    assert {path.parent.name for path in files} == {"tiny-llama", "chat_templates", *data}
    assert sum(path.stat().st_size for path in (ASSETS / "tiny-llama").iterdir()) <= 4_000_000


@pytest.mark.optimized
def test_quickstart(tmp_path, monkeypatch):
    held_out = tmp_path / "held_out.jsonl"
    lines = (ASSETS / "tiny-chat" / "test.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    held_out.write_text("".join(lines[:16]), encoding="utf-8")
    config = quickstart_config(str(tmp_path / "run"))
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, eval=str(held_out)),
        training=dataclasses.replace(config.training, max_steps=80),
    )
    shown = io.StringIO()
    before, after = run(config, Console(file=shown, width=100))
    assert before.exact == 0
    assert after.exact >= 14, after.answers  # 16 after the whole run of 142 steps
    text = shown.getvalue()
    assert f"before 0.0%, after {after.exact / 16:.1%}" in text
    assert f"--adapter {tmp_path}/run/adapter --prompt 'Record: " in text
    assert read_adapter(tmp_path / "run" / "adapter")[0].r == config.lora.r == pytest.approx(16)
