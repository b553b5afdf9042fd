"""`fastjax train` and `fastjax generate` from files to files, and what is left behind when they fail."""

import errno
import json
import re

import numpy as np
import pytest
import yaml

from convert import tensor_file
from fastjax.cli import main
from fastjax.data.tokenizer import own_tokenizer
from fastjax.language_model import FastLanguageModel, saving
from fastjax.runs.fine_tune import fine_tune
from fastjax.training.config import DataSection, LoraSection, ModelSection, OutputSection, TrainConfig, TrainingSection
from tests.support.folders import read_adapter

IDLE = "devices 1 to 7 of 8, since the settings (parallel) take 1"


@pytest.fixture
def settings(chat_folder, chats, tmp_path):
    """A file with the settings of a short run, after changes to sections."""

    def write(**changes):
        content = {
            "model": {"model_name": str(chat_folder), "max_seq_length": 64, "dtype": "float32"},
            "lora": {"r": 4},
            "data": {"train": str(chats), "eval": str(chats), "cache_dir": None},
            "optimizer": {"learning_rate": 0.01, "warmup_steps": 1},
            "training": {"max_steps": 3, "eval_steps": 2},
            "output": {"output_dir": str(tmp_path / "run")},
        }
        for section, values in changes.items():
            content[section] = content.get(section, {}) | values
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump({name: section for name, section in content.items() if section}))
        return ["train", "--config", str(file)]

    return write


def left_behind(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


@pytest.mark.older_jax
def test_train_then_generate(settings, tmp_path, chat_folder, capsys):
    assert main(settings()) == 0
    run = tmp_path / "run"
    out = capsys.readouterr().out
    assert "train: 40 examples in" in out and "one unit of" not in out
    assert "on cpu (device 0, 1 of 8), float32\nidle: " + IDLE + "\n" in out
    assert "step 3/3: loss" in out
    assert f"adapter: {run}/adapter" in out
    assert left_behind(run) == ["adapter", "config.yaml", "metrics.jsonl", "report.html"]
    assert IDLE in (run / "report.html").read_text()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], "loss" in row) for row in rows] == [(1, 1), (1, 0), (2, 1), (2, 0), (3, 1), (3, 0), (3, 0)]
    assert "step 1/3: started: the model loaded in " in out and rows[1]["message"] in (run / "report.html").read_text()
    assert rows[-2]["eval_loss"] < rows[0]["loss"]
    assert rows[-1]["event"] == "finished"
    adapter, arrays = read_adapter(run / "adapter")
    assert adapter.r == 4
    assert adapter.base_model_name_or_path == str(chat_folder)
    assert any(np.any(array != 0) for name, array in arrays.items() if name.endswith("lora_B"))
    assert (run / "adapter" / "tokenizer.json").exists()

    generate = ["generate", "--model", str(chat_folder), "--load_in_4bit", "--max_new_tokens", "5", "--prompt", "abc"]
    assert main([*generate, "--json"]) == 0
    before = json.loads(capsys.readouterr().out)
    assert before["prompt"] == "abc"
    assert main([*generate, "--json", "--adapter", str(run / "adapter")]) == 0
    assert json.loads(capsys.readouterr().out) != before
    assert main([*generate, "--raw", "--temperature", "1", "--prompt", "de"]) == 0
    assert capsys.readouterr().out.startswith("> abc\n")


def test_the_settings_that_were_used_run_again(settings, tmp_path, capsys):
    assert main([*settings(output={"resume": True}), "--training.seed", "7"]) == 0
    assert "no checkpoint to go on from: started from the beginning" in capsys.readouterr().out
    assert main([*settings(output={"resume": True}), "--training.seed", "7"]) == 0
    assert "is finished: nothing is left to do" in capsys.readouterr().out
    again = tmp_path / "run" / "config.yaml"
    first = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert main(["train", "--config", str(again), "--verbose", "--output.output_dir", str(tmp_path / "again")]) == 0
    assert "self_attn.o_proj: one unit of" in capsys.readouterr().out
    second = (tmp_path / "again" / "metrics.jsonl").read_text().splitlines()
    losses = [[json.loads(row).get("loss") for row in rows] for rows in (first, second)]
    assert losses[0] == losses[1]


def test_full_fine_tuning(settings, tmp_path, capsys):
    command = settings(model={"full_finetuning": True, "load_in_4bit": False}, lora={}, training={"eval_steps": None})
    file = tmp_path / "run.yaml"
    content = yaml.safe_load(file.read_text())
    del content["lora"]
    file.write_text(yaml.safe_dump(content))
    assert main(command) == 0
    folder = tmp_path / "run" / "model"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(left_behind(folder))
    capsys.readouterr()
    assert main(["generate", "--model", str(folder), "--prompt", "abc", "--max_new_tokens", "3"]) == 0


def test_an_earlier_result_is_kept(settings, tmp_path, capsys):
    (tmp_path / "run" / "adapter").mkdir(parents=True)
    assert main(settings()) == 2
    assert "output.output_dir: expected a folder without an earlier run" in capsys.readouterr().err
    assert left_behind(tmp_path / "run") == ["adapter"]
    assert main([*settings(), "--output.overwrite_output_dir", "true"]) == 0
    assert left_behind(tmp_path / "run" / "adapter")


@pytest.mark.parametrize(
    ("changes", "status", "message"),
    [
        ({"model": {"model_name": "nowhere"}}, 2, "model.model_name: expected a folder in Hugging Face format"),
        ({"data": {"train": "nowhere.jsonl"}}, 1, "nowhere.jsonl: no such file or folder"),
        ({"lora": {"target_modules": ["nothing"]}}, 2, "nothing"),
        ({"model": {"use_gradient_checkpointing": "some"}}, 2, "use_gradient_checkpointing: expected true or false or"),
        ({"training": {"max_steps": 0}}, 2, "training.max_steps: expected an integer from 1 to 10000000 or null"),
    ],
)  # fmt: skip
def test_wrong_input(settings, tmp_path, capsys, changes, status, message):
    assert main(settings(**changes)) == status
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run" / "adapter").exists()


@pytest.mark.exhaustive(
    by="tests/fastjax/cli/test_broken_runs.py::test_a_row_that_breaks_a_step_is_named_and_the_state_before_it_kept"
)
def test_a_loss_that_is_not_finite(settings, tmp_path, capsys):
    command = settings(optimizer={"learning_rate": 1e38, "warmup_steps": 0}, training={"eval_steps": None})
    assert main(command) == 1
    assert "step 2: the loss is nan" in capsys.readouterr().err
    assert left_behind(tmp_path / "run") == ["checkpoints", "config.yaml", "metrics.jsonl", "report.html"]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-2]["loss"] is None and rows[-1]["event"] == "not_finite"


@pytest.mark.exhaustive("weights")
@pytest.mark.parametrize("place", ["weights", "tokenizer"])
def test_a_full_disk_at_the_end(settings, tmp_path, capsys, monkeypatch, place):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    if place == "weights":
        monkeypatch.setattr("convert.adapters.write_tensor_file", full)
    else:
        monkeypatch.setattr(saving, "_save_tokenizer", full)
    assert main(settings()) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"fastjax train: error: {tmp_path}/run/adapter: No space left on device")
    assert err.count("\n") == 1
    assert left_behind(tmp_path / "run") == ["config.yaml", "metrics.jsonl", "report.html"]


def test_a_full_disk_leaves_the_earlier_result(settings, tmp_path, capsys, monkeypatch):
    earlier = tmp_path / "run" / "adapter" / "adapter_model.safetensors"
    earlier.parent.mkdir(parents=True)
    earlier.write_bytes(b"of an earlier run")

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("convert.adapters.write_tensor_file", full)
    assert main([*settings(), "--output.overwrite_output_dir", "true"]) == 1
    assert left_behind(earlier.parent) == [earlier.name] and earlier.read_bytes() == b"of an earlier run"


@pytest.mark.exhaustive(by="tests/fastjax/cli/test_broken_runs.py::test_resuming_a_finished_run_reads_its_result_back")
def test_from_python(chat_folder, chats, tmp_path):
    config = TrainConfig(
        model=ModelSection(str(chat_folder), max_seq_length=64, load_in_4bit=False),
        data=DataSection(str(chats), cache_dir=None),
        output=OutputSection(str(tmp_path / "run")),
        lora=LoraSection(r=2, use_rslora=True),
        training=TrainingSection(max_steps=2, gradient_accumulation_steps=2),
    )
    result = fine_tune(config)
    assert result.evaluation is None
    assert result.folder == tmp_path / "run" / "adapter"
    assert result.model.lora is not None
    assert result.model.lora.use_rslora
    assert tensor_file.read_header(result.folder / "adapter_model.safetensors")


def test_generate_without_prompt(capsys, chat_folder):
    assert main(["generate", "--model", str(chat_folder)]) == 2
    assert "--prompt: expected at least one prompt" in capsys.readouterr().err


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"


@pytest.mark.exhaustive("adapter")
@pytest.mark.parametrize(
    "model", [{}, {"full_finetuning": True, "load_in_4bit": False}], ids=["adapter", "whole model"]
)
def test_the_chat_template_of_the_run_is_that_of_its_result(settings, tmp_path, chat_folder, chats, model):
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    sections = {"model": model, "data": {"chat_template": str(template)}, "training": {"max_steps": 1}}
    assert main(settings(**sections, lora={"r": 16})) == 0
    if model:
        result, tokenizer = FastLanguageModel.from_pretrained(tmp_path / "run" / "model", load_in_4bit=False)
    else:
        base, before = FastLanguageModel.from_pretrained(chat_folder)
        assert before.chat_template != TEMPLATE
        result = FastLanguageModel.load_adapter(base, tmp_path / "run" / "adapter")
        tokenizer = own_tokenizer(tmp_path / "run" / "adapter")
    assert result.tokenizer.chat_template == tokenizer.chat_template == TEMPLATE


def test_generate_with_scaled_positions(chat_folder, capsys):
    length = json.loads((chat_folder / "config.json").read_text())["max_position_embeddings"]
    generate = ["generate", "--model", str(chat_folder), "--max_new_tokens", "2", "--prompt", "abc"]
    generate += ["--max_seq_length", str(2 * length)]
    assert main(generate) == 2
    (advice,) = re.findall(r"rope_scaling: (\{.*\})", capsys.readouterr().err)
    assert main([*generate, "--rope_scaling", advice]) == 0
    with pytest.raises(SystemExit, match="2"):
        main([*generate, "--rope_scaling", "yarn"])
    assert "expected a mapping such as '{rope_type: yarn, factor: 4.0}', got yarn" in capsys.readouterr().err
