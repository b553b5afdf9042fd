"""`fastjax train` and `fastjax generate` from files to files, and what is left behind when they fail."""

import errno
import json
import re

import numpy as np
import pytest

from fastjax.cli import main
from fastjax.data.tokenizer import own_tokenizer
from fastjax.language_model import FastLanguageModel, saving
from tests.support.folders import read_adapter

IDLE = "devices 1 to 7 of 8, since the settings (parallel) take 1"


@pytest.fixture
def settings(chats, run_file):
    """The command of a short run, after changes to sections."""

    short = {"lora": {"r": 4}, "data": {"eval": str(chats)}, "training": {"max_steps": 3, "eval_steps": 2}}
    return lambda **changes: ["train", "--config", run_file(short, **changes)]


def left_behind(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


@pytest.mark.older_jax
def test_train_then_generate(settings, tmp_path, one_layer_folder, capsys):
    assert main(settings(model={"model_name": str(one_layer_folder)})) == 0
    run = tmp_path / "run"
    out = capsys.readouterr().out
    assert "train: 40 examples in" in out and "one unit of" not in out
    assert re.search(r"on cpu \(device 0, 1 of 8\), float32\nexecution: .*\nidle: " + re.escape(IDLE) + "\n", out)
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
    assert adapter.base_model_name_or_path == str(one_layer_folder)
    assert any(np.any(array != 0) for name, array in arrays.items() if name.endswith("lora_B"))
    assert (run / "adapter" / "tokenizer.json").exists()

    generate = ["generate", "--model", str(one_layer_folder), "--load_in_4bit", "--max_new_tokens", "5"]
    generate += ["--prompt", "abc", "--prompt", "de"]
    assert main([*generate, "--json"]) == 0
    before = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["prompt"] for row in before] == ["abc", "de"]
    assert main([*generate, "--json", "--adapter", str(run / "adapter")]) == 0
    after = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert after[0] != before[0]
    assert main([*generate, "--raw", "--temperature", "1"]) == 0
    assert capsys.readouterr().out.startswith("> abc\n")


def test_the_settings_that_were_used_run_again(settings, tmp_path, one_layer_folder, capsys):
    command = settings(model={"model_name": str(one_layer_folder)}, output={"resume": True})
    assert main([*command, "--training.seed", "7"]) == 0
    assert "no checkpoint to go on from: started from the beginning" in capsys.readouterr().out
    assert main([*command, "--training.seed", "7"]) == 0
    assert "is finished: nothing is left to do" in capsys.readouterr().out
    again = tmp_path / "run" / "config.yaml"
    first = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert main(["train", "--config", str(again), "--verbose", "--output.output_dir", str(tmp_path / "again")]) == 0
    assert "self_attn.o_proj: one unit of" in capsys.readouterr().out
    second = (tmp_path / "again" / "metrics.jsonl").read_text().splitlines()
    losses = [[json.loads(row).get("loss") for row in rows] for rows in (first, second)]
    assert losses[0] == losses[1]


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
        folder = tmp_path / "run" / "model"
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(left_behind(folder))
        result, tokenizer = FastLanguageModel.from_pretrained(folder, load_in_4bit=False)
    else:
        base, before = FastLanguageModel.from_pretrained(chat_folder)
        assert before.chat_template != TEMPLATE
        result = FastLanguageModel.load_adapter(base, tmp_path / "run" / "adapter")
        tokenizer = own_tokenizer(tmp_path / "run" / "adapter")
    assert result.tokenizer.chat_template == tokenizer.chat_template == TEMPLATE


@pytest.mark.exhaustive(by="tests/fastjax/models/test_rope_config.py::test_rows_longer_than_the_model")
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
