"""A run opens each of its folders once, from the command to the loaded weights."""

import collections
import io
from pathlib import Path

import pytest
from rich.console import Console

from convert import adapters, checkpoint, files
from fastjax.data import tokenizer
from fastjax.execution import opening as folders
from fastjax.language_model.saving import save_pretrained
from fastjax.runs import opening
from fastjax.runs.context import FineTuned
from fastjax.runs.fine_tune import fine_tune
from fastjax.runs.training_run import TrainingRun
from tests.support import chat
from tests.support.runs import config


@pytest.fixture
def opened(monkeypatch):
    """How often each of these is read, by folder and file: config.json, headers of weights, tokenizers."""
    counts = collections.Counter()

    def count(module, name, file):
        original = getattr(module, name)

        def counted(path, *rest, **options):
            counts[Path(path).parent.name if file is None else Path(path).name, file or Path(path).name] += 1
            return original(path, *rest, **options)

        monkeypatch.setattr(module, name, counted)

    for module in (files, checkpoint, adapters, folders, opening):
        count(module, "read_json", None)
    for module in (checkpoint, adapters):
        count(module, "read_header", None)
    for module in (tokenizer, folders):
        count(module, "load_tokenizer", "tokenizer")
    return counts


def test_a_run_opens_its_folders_once(tmp_path, monkeypatch, opened):
    model, data = chat.write_model(tmp_path / "model"), chat.write_chats(tmp_path / "chats.jsonl")
    sections = {
        "model": {"model_name": str(model), "max_seq_length": 48, "dtype": "float32", "load_in_4bit": False},
        "data": {"train": str(data), "cache_dir": None},
        "training": {"max_steps": 1},
    }
    base = {("model", name): 1 for name in ("config.json", "model.safetensors", "tokenizer")}

    def stop(training):
        stopped.append(training.run.model)
        return FineTuned(*[None] * 4)

    def saved(training):
        save_pretrained(training.run.model.replace(trainable=training.state.trainable), tmp_path / "adapter")
        return FineTuned(*[None] * 4)

    stopped = []
    monkeypatch.setattr(TrainingRun, "train", saved)
    opened.clear()
    fine_tune(config(**sections, lora={"r": 2}, output={"output_dir": str(tmp_path / "a")}), quiet())
    assert opened == base
    opened.clear()
    monkeypatch.setattr(TrainingRun, "train", stop)
    lora = {"adapter": str(tmp_path / "adapter")}
    fine_tune(config(**sections, lora=lora, output={"output_dir": str(tmp_path / "b")}), quiet())
    adapter = {("adapter", name): 1 for name in ("adapter_config.json", "adapter_model.safetensors", "tokenizer")}
    assert opened == base | adapter
    assert stopped[0].lora.r == 2


def test_a_preview_opens_no_weights_of_a_name_on_the_hub(tmp_path, monkeypatch, opened):
    from convert.hub import Source

    model = chat.write_model(tmp_path / "model")
    wanted = []

    def located(config, key, *, weights):
        wanted.append(weights)
        return Source(model, "org/model", "1" * 40)

    monkeypatch.setattr(opening, "located", located)
    opened.clear()
    found = opening.open_model(config(model={"model_name": "org/model", "max_seq_length": 48}), weights=False)
    assert found.weights is None and wanted == [False]
    assert opened == {("model", "config.json"): 1, ("model", "tokenizer"): 1}


def quiet():
    return Console(file=io.StringIO())
