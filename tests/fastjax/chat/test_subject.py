"""A run's folder, an adapter's and a model's as somebody to talk to."""

import json

import pytest
import yaml

from fastjax.chat.subject import Subject, find_subject
from fastjax.errors import ConfigError


@pytest.fixture
def run(tmp_path):
    """A run's folder, without its result."""
    folder = tmp_path / "mine"
    folder.mkdir()
    model = {"model_name": "org/base@v1", "load_in_4bit": True, "dtype": "bfloat16", "max_seq_length": 64}
    (folder / "config.yaml").write_text(yaml.safe_dump({"model": model}))
    return folder


def adapter(folder, base):
    folder.mkdir()
    settings = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "base_model_name_or_path": base}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def test_a_run_and_its_adapter_are_the_same(run):
    with pytest.raises(ConfigError, match="has not finished; go on with fastjax train --config .* --resume"):
        find_subject(str(run))
    result = adapter(run / "adapter", "elsewhere")
    expected = Subject("mine", "org/base@v1", str(result), {"load_in_4bit": True, "dtype": "bfloat16"})
    assert find_subject(str(run)) == find_subject(str(result)) == expected


def test_a_run_of_all_weights(run):
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["model"] |= {"full_finetuning": True, "load_in_4bit": False, "rope_scaling": {"rope_type": "yarn"}}
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    model = run / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    expected = Subject("mine", str(model), None, {"load_in_4bit": False, "dtype": "bfloat16"})
    assert find_subject(str(run)) == find_subject(str(model)) == expected


def test_others(tmp_path, run):
    alone = adapter(tmp_path / "alone", "org/base")
    assert find_subject(str(alone)) == Subject("alone", "org/base", str(alone), {"load_in_4bit": False})
    nameless = adapter(tmp_path / "nameless", None)
    with pytest.raises(ConfigError, match="names its base .* fastjax chat BASE --adapter"):
        find_subject(str(nameless))
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    plain = {"load_in_4bit": False}
    assert find_subject(str(tmp_path / "model")) == Subject("model", str(tmp_path / "model"), None, plain)
    assert find_subject("org/name") == Subject("name", "org/name", None, plain)
    (run / "checkpoints/2").mkdir(parents=True)
    with pytest.raises(ConfigError, match="expected the folder of a run, .* got one with nothing; a checkpoint"):
        find_subject(str(run / "checkpoints/2"))
