"""Mistakes in a run's model or adapter are told by `preview` as by `train`, before the data are looked for."""

import json
import re
import shutil

import pytest
import yaml

from convert.adapter_config import AdapterConfig, config_to_json
from convert.checkpoint import write_config
from fastjax.cli import main
from tests.support import chat


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder, and beside it an adapter's."""
    folder = chat.write_model(tmp_path_factory.mktemp("models") / "tiny")
    adapter = folder.parent / "adapter"
    adapter.mkdir()
    write_config(adapter / "adapter_config.json", config_to_json(AdapterConfig(target_modules=["q_proj"])))
    (adapter / "adapter_model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    return folder


def change(**fields):
    def apply(folder):
        config = json.loads((folder / "config.json").read_text())
        write_config(folder / "config.json", config | fields)

    return apply


def cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def leave_out(folder):
    (folder / "model.safetensors").unlink()


WRONG = {
    "model type": (change(model_type="bloom"), {}, 1, "bloom"),
    "unsupported field": (change(num_experts=8), {}, 1, "num_experts"),
    "activation": (change(hidden_act="tanh_plus"), {}, 1, "hidden_act"),
    "tokenizer": (change(vocab_size=100), {}, 2, "but the embedding has 100 rows"),
    "cut file": (cut, {}, 1, "model.safetensors"),
    "no weights": (leave_out, {}, 1, "model.safetensors"),
    "tensors": (change(intermediate_size=96), {}, 1, "shape"),
    "length": (None, {"model.max_seq_length": 10**6}, 2, "max_seq_length: expected at most the model's"),
    "module": (None, {"model.float32_modules": ["nrm"]}, 2, "no module has the name 'nrm'"),
    "scaling": (None, {"model.rope_scaling": {"rope_type": "yran"}}, 2, "yran"),
    "new token": (
        None,
        {"model.new_tokens": ["<s>"]},
        2,
        "new_tokens: expected tokens that the tokenizer does not know",
    ),
    "target": (None, {"lora.target_modules": ["q_porj"]}, 2, "['q_porj'] matches no module of this model; there"),
    "one of two targets": (None, {"lora.target_modules": ["q_proj", "v_prj"]}, 2, "got ['v_prj'], which none has"),
    "long target": (None, {"lora.target_modules": "query" * 2000}, 2, "… matches no module of this"),
    "rank": (None, {"lora.rank_pattern": {"query": 4}}, 2, "lora.rank_pattern: .* got ['query'], which match none"),
    "alpha": (
        None,
        {"lora.alpha_pattern": {"v_proj": 4}, "lora.target_modules": ["q_proj"]},
        2,
        "lora.alpha_pattern: .*['v_proj']",
    ),
    "layer": (
        None,
        {"lora.layers_to_transform": [0, 99]},
        2,
        "lora.layers_to_transform: expected layers from 0 to .* [99]",
    ),
    "saved": (
        None,
        {"lora.modules_to_save": ["mlp"]},
        2,
        "modules_to_save: expected some of .*'lm_head'.*, got ['mlp'];",
    ),
    "expression": (None, {"lora.target_modules": "q_(proj"}, 2, "target_modules: expected regular expressions"),
    "row": (None, {"lora.trainable_token_indices": [10**6]}, 2, "trainable_token_indices: expected different ids"),
    "odd rank": (None, {"lora.r": 3, "lora.init_lora_weights": "orthogonal"}, 2, "expected an even rank, got 3"),
    "adapter": (
        lambda folder: write_config(
            folder.parent / "adapter" / "adapter_config.json", config_to_json(AdapterConfig(target_modules=["c_attn"]))
        ),
        {"lora.adapter": "adapter"},
        2,
        "['c_attn'] matches no module of this model",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_preview_refuses_what_train_refuses(case, folder, tmp_path, capsys):
    mend, settings, status, message = WRONG[case]
    shutil.copytree(folder.parent, tmp_path / "models")
    model = tmp_path / "models" / folder.name
    if mend is not None:
        mend(model)
    if "lora.adapter" in settings:
        settings = {"lora.adapter": str(tmp_path / "models" / settings["lora.adapter"])}
    settings = {
        "model.model_name": str(model),
        "model.max_seq_length": 64,
        "data.train": str(tmp_path / "nowhere.jsonl"),
        "output.output_dir": str(tmp_path / "run"),
    } | settings
    sections = {}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(sections))
    said = []
    for command in ("preview", "train"):
        assert main([command, "--config", str(tmp_path / "run.yaml")]) == status
        said.append(capsys.readouterr().err.removeprefix(f"fastjax {command}: "))
    assert said[0] == said[1]
    assert re.search(re.escape(message).replace(r"\.\*", ".*"), said[0])
