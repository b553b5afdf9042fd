"""What README and the examples say works."""

import dataclasses
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from fastjax.cli import COMMANDS
from fastjax.commands import convert, generate
from fastjax.commands.quickstart import quickstart_config
from fastjax.commands.reference import list_sections
from fastjax.commands.settings import parse_train_config
from fastjax.training.report import usage

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda file: file.stem)
def test_examples_are_read(file):
    parse_train_config(["--config", str(file)])


def test_the_quickstart_is_its_example(monkeypatch):
    monkeypatch.chdir(ROOT)
    example = parse_train_config(["--config", "examples/quickstart.yaml"])
    built_in = quickstart_config("runs/quickstart")
    assert Path(example.model.model_name).samefile(built_in.model.model_name)
    assert dataclasses.replace(example.model, model_name=built_in.model.model_name) == built_in.model
    assert isinstance(example.data.train, str)
    assert isinstance(example.data.eval, str)
    assert Path(example.data.train).samefile(built_in.data.train)
    assert Path(example.data.eval).samefile(built_in.data.eval)
    assert (example.lora, example.optimizer, example.training) == (built_in.lora, built_in.optimizer, built_in.training)
    assert example.output == built_in.output


def test_readme_shows_the_settings_for_a_model_of_ones_own():
    (shown,) = blocks("yaml")
    file = (ROOT / "examples/my_model.yaml").read_text(encoding="utf-8")
    assert shown == "".join(line for line in file.splitlines(keepends=True) if not line.startswith("#"))


def test_readme_shows_the_lines_of_the_report():
    (shown,) = [block for block in blocks("python") if "from peft" in block]
    config = parse_train_config(["--config", str(ROOT / "examples/my_model.yaml")])
    folder = Path(config.output.output_dir) / "adapter"
    assert usage(config, folder, {"dtype": "bfloat16"}, "bfloat16")[1] + "\n" == shown


def test_commands_that_readme_shows_are_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text((ROOT / "examples/my_model.yaml").read_text())
    lines = [shlex.split(line, comments=True) for block in blocks("bash") for line in block.splitlines()]
    commands = [words[1:] for words in lines if words[:1] == ["fastjax"]]
    assert [name for name, *_ in commands] == ["preview", "train", "train", "generate", "convert", "convert"]
    for name, *words in commands:
        if name in ("train", "preview"):
            words = ["--config", *words] if name == "preview" else words
            config = parse_train_config(words)
            assert config.model.max_seq_length == 2048 and config.optimizer.learning_rate == 2e-4
        else:
            {"generate": generate, "convert": convert}[name]._parser().parse_args(words)


def test_readme_names_every_recipe():
    for file in (ROOT / "examples").glob("*.yaml"):
        assert f"(examples/{file.name})" in README


@pytest.mark.parametrize(
    "file",
    [
        *(
            "README.md",
            "CONTRIBUTING.md",
            "docs/training.md",
            "docs/performance.md",
            "docs/convert.md",
            "docs/memory.md",
            "docs/parallel.md",
            "docs/preferences.md",
        ),
        *(str(file.relative_to(ROOT)) for file in sorted((ROOT / "docs/lab").glob("*.md"))),
    ],
)
def test_links_lead_somewhere(file):
    text = (ROOT / file).read_text(encoding="utf-8")
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert ((ROOT / file).parent / link).exists(), link


def test_the_reference_of_settings_is_up_to_date(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import write_settings_reference

    written = write_settings_reference.FILE.read_text(encoding="utf-8")
    assert written == write_settings_reference.page(), "run scripts/write_settings_reference.py"


def test_every_setting_is_documented():
    for section in list_sections():
        for setting in section.settings:
            assert len(setting.meaning) > 4, f"{section.name}.{setting.name}"


@pytest.mark.parametrize("columns", [80, 120])
def test_help_fits_and_says_what_is_taken(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit, match="0"):
        parse_train_config(["--help"])
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= columns
    assert "--lora.r  an integer; default 16\n      rank" in shown
    assert not re.search(r"\(type|Union|Optional|Literal|==SUPPRESS==", shown)


def test_readme_names_every_command():
    for command in COMMANDS:
        assert f"`fastjax {command}" in README
    for line in README.splitlines():
        for command in re.findall(r"`fastjax (?!--)([\w-]+)", line):
            assert command in COMMANDS


def test_readme_python(chat_folder, chats, tmp_path, monkeypatch):
    """The blocks run one after the other, on a small model and two steps."""
    monkeypatch.chdir(tmp_path)
    code = "\n".join(block for block in blocks("python") if "from peft" not in block)
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


def test_own_loss_and_evaluation(chat_folder, chats, tmp_path, monkeypatch):
    """The block of docs/training.md, on a small model and two steps."""
    monkeypatch.chdir(ROOT)
    (code,) = blocks("python", (ROOT / "docs" / "training.md").read_text(encoding="utf-8"))
    given = '"--config", "examples/quickstart.yaml"'
    assert given in code
    changes = {"model.model_name": chat_folder, "data.train": chats, "data.eval": chats, "output.output_dir": tmp_path}
    changes |= {"model.max_seq_length": 128, "training.max_steps": 2}
    options = "".join(f', "--{key}", "{value}"' for key, value in changes.items())
    names: dict = {}
    exec(code.replace(given, given + options), names)
    assert names["result"].evaluation.extra == {"eval_exact": 0.0}


def test_preferences(chat_folder, monkeypatch):
    """The blocks of docs/preferences.md, on a small model: the loss falls, the margin grows."""
    code = "\n".join(blocks("python", (ROOT / "docs" / "preferences.md").read_text(encoding="utf-8")))
    for written, used in [("path/to/model", str(chat_folder)), ("2048", "128"), ("1e-3", "3e-3")]:
        assert written in code
        code = code.replace(written, used)
    names: dict = {}
    exec(code, names)
    losses, margins = zip(*names["history"], strict=True)
    np.testing.assert_allclose(losses[0], np.log(2), rtol=1e-6)  # B is zero: policy and reference are equal
    assert margins[0] == 0
    assert np.all(np.diff(losses) < 0) and np.all(np.diff(margins) > 0)
    known = names["rows"].fields["reference_log_probs"]
    assert known.shape == (4,) and np.all(known < 0)
