"""What README and the examples say works."""

import re
from pathlib import Path

import pytest

from fastjax.cli import COMMANDS
from fastjax.commands.settings import parse_train_config

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda file: file.stem)
def test_examples_are_read(file):
    parse_train_config(["--config", str(file)])


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
