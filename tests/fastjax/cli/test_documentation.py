"""README, the manual and the examples: the code that they show works."""

import dataclasses
import importlib
import inspect
import re
import shlex
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
import yaml

import fastjax
from fastjax import FastLanguageModel
from fastjax.cli import COMMANDS
from fastjax.commands import chat
from fastjax.commands.quickstart import quickstart_config
from fastjax.commands.reference import list_sections
from fastjax.commands.settings import parse_train_config
from fastjax.training.report import usage_of_run
from tests.support.shown_code import Reader

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON, START, COMMAND_LINE = (
    (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("python", "index", "commands")
)


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


def test_the_first_screen_is_short():
    assert len(README.splitlines()) <= 130


def test_the_start_page_shows_the_settings_for_a_model_of_ones_own():
    (shown,) = blocks("yaml", START)
    file = (ROOT / "examples/my_model.yaml").read_text(encoding="utf-8")
    assert shown == "".join(line for line in file.splitlines(keepends=True) if not line.startswith("#"))


def test_the_manual_shows_the_lines_of_the_report():
    (shown,) = [block for block in blocks("python", PYTHON) if "from peft" in block]
    config = parse_train_config(["--config", str(ROOT / "examples/my_model.yaml")])
    folder = Path(config.output.output_dir) / "adapter"
    assert usage_of_run(config, folder, {"dtype": "bfloat16"}, "bfloat16").python + "\n" == shown


@pytest.mark.parametrize("text", [README, START], ids=["README", "index"])
def test_commands_that_are_shown_first_are_read(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text((ROOT / "examples/my_model.yaml").read_text())
    shown = "\n".join(blocks("bash", text)).replace("\\\n", " ")
    lines = [shlex.split(line, comments=True) for line in shown.splitlines()]
    commands = [words[1:] for words in lines if words[:1] == ["fastjax"]]
    assert {"preview", "train", "chat"} <= {name for name, *_ in commands}
    for name, *words in commands:
        if name in ("train", "preview", "plan"):
            words = words if name == "train" else ["--config", words[0]]
            config = parse_train_config(words)
            own = (2048, 2e-4) if "--config" in words else (512, 1e-3)
            assert (config.model.max_seq_length, config.optimizer.learning_rate) == own
        else:
            assert name == "chat" and chat._parser().parse_args(words)


def test_the_start_page_names_every_recipe():
    for file in (ROOT / "examples").glob("*.yaml"):
        assert f"(../examples/{file.name})" in START


@pytest.mark.parametrize(
    "file",
    [
        *("README.md", "CONTRIBUTING.md", "notebooks/README.md"),
        *(str(file.relative_to(ROOT)) for file in sorted((ROOT / "docs").rglob("*.md"))),
    ],
)
def test_links_lead_somewhere(file):
    text = (ROOT / file).read_text(encoding="utf-8")
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert ((ROOT / file).parent / link).exists(), link


def test_recipes_are_changes_of_the_settings_for_a_model_of_ones_own(tmp_path):
    shown = blocks("yaml", (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8"))
    assert len(shown) > 10
    for number, block in enumerate(shown):
        settings = yaml.safe_load((ROOT / "examples/my_model.yaml").read_text(encoding="utf-8"))
        changes = yaml.safe_load(block)
        if changes.get("model", {}).get("full_finetuning") or "adapter" in changes.get("lora", {}):
            del settings["lora"]  # as the text says
        file = tmp_path / f"{number}.yaml"
        file.write_text(yaml.safe_dump(settings | {name: settings.get(name, {}) | changes[name] for name in changes}))
        config = dataclasses.asdict(parse_train_config(["--config", str(file)]))
        for section, keys in changes.items():
            for key, value in keys.items():
                assert key == "train" or config[section][key] == value, f"{section}.{key}"


def named(name: str) -> object:
    """The module, function or class of a dotted name."""
    place, _, last = name.rpartition(".")
    module = importlib.import_module(place)
    return getattr(module, last) if hasattr(module, last) else importlib.import_module(name)


def test_the_reference_has_every_public_name():
    """Names that README and the manual import or spell out, and `fastjax.__all__`, are in docs/api."""
    pages = {file: file.read_text(encoding="utf-8") for file in (ROOT / "docs").rglob("*.md")}
    api = "\n".join(text for file, text in pages.items() if file.parent.name == "api")
    listed = re.findall(r"^::: (\S+)$", api, re.MULTILINE)
    assert len(listed) > 80
    text = "\n".join([README, *(text for file, text in pages.items() if file.parent.name == "docs")])
    names = {f"fastjax.{name}" for name in fastjax.__all__}
    names |= set(re.findall(r"`((?:fastjax|convert|pallas_kernels)(?:\.\w+)+)[`(]", text))
    for module, imported in re.findall(r"^from ((?:fastjax|convert|pallas)\S*) import (.+)$", text, re.MULTILINE):
        names |= {f"{module}.{name}" for name in imported.split(", ")}
    for name in sorted(names - set(listed)):
        value, last = named(name), name.rpartition(".")[2]
        own = getattr(value, "__name__", last)  # of another name for a class
        elsewhere = [named(other) for other in listed if other.endswith((f".{last}", f".{own}"))]
        assert inspect.ismodule(value) or value in elsewhere, f"{name}: expected a line in docs/api"


def test_the_reference_of_settings_is_up_to_date(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import write_settings_reference

    written = write_settings_reference.FILE.read_text(encoding="utf-8")
    assert written == write_settings_reference.page(), "run scripts/write_settings_reference.py"


def test_every_setting_is_documented():
    for name, _, settings in list_sections():
        for setting in settings:
            assert len(setting.meaning) > 4, f"{name}.{setting.name}"


@pytest.mark.parametrize("columns", [80, 120])
def test_help_fits_and_says_what_is_taken(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit, match="0"):
        parse_train_config(["--help"])
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= columns
    assert "--lora.r  an integer from 1 to 65536; default 16\n      rank" in shown
    assert not re.search(r"\(type|Union|Optional|Literal|==SUPPRESS==", shown)


def test_the_manual_names_every_command():
    for command in COMMANDS:
        assert f"`fastjax {command}" in COMMAND_LINE
    for line in (README + COMMAND_LINE).splitlines():
        for command in re.findall(r"`fastjax (?!--)([\w-]+)", line):
            assert command in COMMANDS


@pytest.mark.parametrize(
    "file", ["README.md", *(f"docs/{name}.md" for name in ("python", "preferences", "evaluation"))]
)
def test_shown_python_has_names_and_arguments_that_are_there(file):
    reader, shown = Reader(), blocks("python", (ROOT / file).read_text(encoding="utf-8"))
    for block in shown:
        if "from peft" not in block:
            reader.read(block)
    assert reader.calls > len(shown)


def run_shown(code: str, changes: dict[str, object]) -> dict:
    """The names that a page's code has made, with what it is given changed to what is at hand."""
    for written, used in changes.items():
        assert written in code
        code = code.replace(written, str(used))
    names: dict = {}
    exec(code, names)
    return names


def test_readme_python(chat_folder, chats, tmp_path, monkeypatch):
    """The five lines on a small model, and one update: the adapter and its card are where the text says."""
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("python")
    few = "TrainerSettings('runs/python', __import__('fastjax').TrainingSection(max_steps=1))"
    changes = {"path/to/model": chat_folder, "chat.jsonl": chats, "2048": 64, 'TrainerSettings("runs/python")': few}
    run_shown(code, changes | {"max_new_tokens=64": "max_new_tokens=4"})
    found = {path.name for path in (tmp_path / "runs" / "python" / "adapter").iterdir()}
    assert {"adapter_model.safetensors", "README.md"} <= found
    assert (tmp_path / "runs" / "python" / "report.html").exists()


@pytest.mark.exhaustive(by="test_shown_python_has_names_and_arguments_that_are_there, test_readme_python")
def test_the_page_of_python(tmp_path, monkeypatch):
    """The other blocks of docs/python.md, one after the other, on the embedded model."""
    monkeypatch.chdir(tmp_path)
    shown = [block for block in blocks("python", PYTHON) if "fine_tune" not in block and "from peft" not in block]
    assets = ROOT / "fastjax" / "assets"
    changes = {
        "path/to/model": assets / "tiny-llama",
        "chat.jsonl": assets / "tiny-chat" / "test.jsonl",
        "2048": 128,
        "from_step(0, 100)": "from_step(0, 2)",
        'type="q8_0"': 'type="q8_0", pre_tokenizer="gpt-2"',  # the tiny tokenizer's own has no name in llama.cpp
    }
    names = run_shown("\n".join(shown), changes)
    learnt = jax.tree.leaves(names["trained"].trainable)
    loaded = jax.tree.leaves(FastLanguageModel.load_adapter(names["base"], "trained").trainable)
    assert all(np.array_equal(one, other) for one, other in zip(learnt, loaded, strict=True))
    assert np.isfinite(names["held_out_loss"]) and int(names["fitted"].progress.step) == 3
    assert 0 < max(names["errors"].values()) < 0.02  # int8 with a scale a row: half a step of 1/127 of the largest
    np.testing.assert_allclose(names["y"], names["x"] @ names["W"].T, rtol=1e-4, atol=1e-4)
    expected = optax.softmax_cross_entropy_with_integer_labels(names["hidden"] @ names["W"].T, names["targets"]).sum()
    np.testing.assert_allclose(names["loss"], expected, rtol=1e-5)
    assert names["out"].shape == (1, 32, 4, 16) and not names["out"][0, 28:].any()  # padding sees nothing


@pytest.mark.exhaustive(
    by="test_shown_python_has_names_and_arguments_that_are_there, "
    "tests/fastjax/cli/test_broken_runs.py::test_a_users_evaluation_decides_nothing_but_is_reported"
)
def test_own_loss_and_evaluation(chat_folder, chats, tmp_path, monkeypatch):
    """The block of docs/python.md, on a small model and two steps."""
    monkeypatch.chdir(ROOT)
    (code,) = [block for block in blocks("python", PYTHON) if "fine_tune" in block]
    given = '"--config", "examples/quickstart.yaml"'
    assert given in code
    changes = {"model.model_name": chat_folder, "data.train": chats, "data.eval": chats, "output.output_dir": tmp_path}
    changes |= {"model.max_seq_length": 128, "training.max_steps": 2}
    options = "".join(f', "--{key}", "{value}"' for key, value in changes.items())
    names: dict = {}
    exec(code.replace(given, given + options), names)
    assert names["result"].evaluation.extra == {"eval_exact": 0.0}


@pytest.mark.exhaustive(
    by="test_shown_python_has_names_and_arguments_that_are_there, "
    "tests/fastjax/cli/test_import_preferences.py::test_an_imported_run_over_preferences_trains"
)
def test_preferences(chat_folder, tmp_path, monkeypatch):
    """The blocks of docs/preferences.md, on a small model: the loss falls, the margin grows."""
    monkeypatch.chdir(tmp_path)
    code = "\n".join(blocks("python", (ROOT / "docs" / "preferences.md").read_text(encoding="utf-8")))
    names = run_shown(code, {"path/to/model": chat_folder, "2048": 128, "512": 128, "1e-3": "3e-3"})
    assert names["rewards"].shape == (2,) and names["rewards"][0] != names["rewards"][1]
    losses, margins = zip(*names["history"], strict=True)
    np.testing.assert_allclose(losses[0], np.log(2), rtol=1e-6)  # B is zero: policy and reference are equal
    assert margins[0] == 0
    assert np.all(np.diff(losses) < 0) and np.all(np.diff(margins) > 0)
    known = names["rows"].fields["reference_log_probs"]
    assert known.shape == (4,) and np.all(known < 0)
