"""Mistakes that show before a run's data are encoded and its weights are read are errors by then."""

import importlib
import json

import numpy as np
import pytest

from convert.adapters import AdapterConfig, write_adapter
from convert.errors import ConvertError
from fastjax.errors import ConfigError
from fastjax.language_model import FastLanguageModel
from fastjax.language_model.as_trained import load_as_trained
from fastjax.runs.comparison import compare_logits
from fastjax.runs.fine_tune import fine_tune
from tests.support.runs import config

OTHER_SHAPES = {"A": (2, 6), "B": (6, 2)}


@pytest.fixture
def run(chat_folder, chats, tmp_path, monkeypatch):
    """Start a run that would fail with AssertionError if it encoded data or read a tensor."""

    def too_late(*_, **__):
        raise AssertionError("too late")

    monkeypatch.setattr("fastjax.runs.datasets.prepare", too_late)
    monkeypatch.setattr("fastjax.language_model.loading.load_weights", too_late)

    def run(**changes):
        sections = {
            "model": {"model_name": str(chat_folder), "max_seq_length": 48},
            "data": {"train": str(chats), "cache_dir": None},
            "output": {"output_dir": str(tmp_path / "run")},
        }
        return fine_tune(config(**sections | {name: sections.get(name, {}) | changes[name] for name in changes}))

    return run


def test_a_run_with_nothing_wrong_gets_to_its_data(run):
    with pytest.raises(AssertionError, match="too late"):
        run(lora={"rank_pattern": {"q_proj": 2}, "target_modules": ["q_proj"], "layers_to_transform": 0})


@pytest.mark.parametrize(
    ("section", "keys", "message"),
    [
        ("lora", {"adapter": "nowhere"}, "^lora.adapter: expected a PEFT folder"),
        (
            "output",
            {"report_to": ["wandb"]},
            "^output.report_to: wandb needs the package wandb, which cannot be imported",
        ),
        ("data", {"eval": "nowhere.jsonl"}, "nowhere.jsonl"),
        ("data", {"eval": [7]}, "^data.eval: expected a string"),
    ],
)
def test_what_is_wrong_is_said_before(run, section, keys, message, monkeypatch):
    real = importlib.import_module

    def no_wandb(name, *rest):
        if name == "wandb":
            raise ModuleNotFoundError("No module named 'wandb'")
        return real(name, *rest)

    monkeypatch.setattr("fastjax.training.trackers.importlib.import_module", no_wandb)
    with pytest.raises((ConfigError, FileNotFoundError), match=message):
        run(**{section: keys})


def test_an_adapter_to_start_from_is_opened_before(run, tmp_path):
    (tmp_path / "adapter").mkdir()
    with pytest.raises(ConvertError, match="adapter_config.json: no such file"):
        run(lora={"adapter": str(tmp_path / "adapter")})
    settings = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConvertError, match="adapter_model.safetensors: no such file"):
        run(lora={"adapter": str(tmp_path / "adapter")})


def test_adapters_on_embedding_and_head_are_told_once(run, capsys):
    with pytest.raises(AssertionError, match="too late"):
        run(lora={"target_modules": ["q_proj", "embed_tokens", "lm_head"]})
    note = "lora.target_modules: low-rank adapters on embed_tokens and lm_head, as in PEFT; Unsloth trains the whole"
    assert capsys.readouterr().out.count(note) == 1


@pytest.mark.parametrize("where", ["lora.adapter", "--adapter", "verify", "from_pretrained"])
def test_an_adapter_of_another_model_is_refused_before(run, where, chat_folder, tmp_path):
    config = AdapterConfig(r=2, target_modules=["q_proj"], base_model_name_or_path=str(chat_folder))
    arrays = {f"layers.0.self_attn.q_proj.lora_{side}": np.ones(shape, "f4") for side, shape in OTHER_SHAPES.items()}
    folder, base = tmp_path / "adapter", str(chat_folder)
    write_adapter(folder, config, arrays)
    with pytest.raises(
        ConfigError, match=f"adapter: the adapter does not fit the model .*name {base} as .*lora_A: exp"
    ):
        if where == "lora.adapter":
            run(lora={"adapter": str(folder)})
        elif where == "--adapter":
            load_as_trained(base, folder)
        elif where == "verify":
            compare_logits(base, base, ["one"], adapter=folder)
        else:
            FastLanguageModel.from_pretrained(folder, load_in_4bit=False)


def test_a_folder_without_its_weights_is_told_before(run, chat_folder, tmp_path):
    (tmp_path / "model").mkdir()
    for file in chat_folder.iterdir():
        if not file.name.endswith(".safetensors"):
            (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ConvertError, match="expected model.safetensors or"):
        run(model={"model_name": str(tmp_path / "model")})
