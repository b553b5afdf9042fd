"""What README and the examples say works."""

import dataclasses
import re
from pathlib import Path

import pytest

from fastjax.cli import COMMANDS
from fastjax.commands.quickstart import quickstart_config
from fastjax.commands.settings import parse_train_config

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda file: file.stem)
def test_examples_are_read(file):
    parse_train_config(["--config", str(file)])


def test_the_quickstart_is_its_example(monkeypatch):
    monkeypatch.chdir(ROOT)
    example = parse_train_config(["--config", "examples/quickstart.yaml"])
    built_in = quickstart_config("runs/quickstart")
    assert Path(example.model.model_name).samefile(built_in.model.model_name)
    assert dataclasses.replace(example.model, model_name=built_in.model.model_name) == built_in.model
    assert isinstance(example.data.train_file, str)
    assert isinstance(example.data.eval_file, str)
    assert Path(example.data.train_file).samefile(built_in.data.train_file)
    assert Path(example.data.eval_file).samefile(built_in.data.eval_file)
    assert (example.lora, example.optimizer, example.training) == (built_in.lora, built_in.optimizer, built_in.training)
    assert example.output == built_in.output


def test_readme_shows_an_example():
    (shown,) = blocks("yaml")
    assert shown == (ROOT / "examples" / "qlora_chat.yaml").read_text(encoding="utf-8")


def test_readme_names_every_command():
    for command in COMMANDS:
        assert f"`fastjax {command}" in README
    for line in README.splitlines():
        for command in re.findall(r"`fastjax (?!--)(\w+)", line):
            assert command in COMMANDS


def test_readme_python(chat_folder, chats, tmp_path, monkeypatch):
    """The blocks run one after the other, on a small model and two steps."""
    monkeypatch.chdir(tmp_path)
    code = "\n".join(blocks("python"))
    for written, used in [
        ("path/to/model", str(chat_folder)),
        ("chat.jsonl", str(chats)),
        ("2048", "64"),
        ("from_step(0, 100)", "from_step(0, 2)"),
    ]:
        assert written in code
        code = code.replace(written, used)
    names: dict = {}
    exec(code, names)
    assert int(names["state"].step) == 2
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
