"""What a run began with, by its contents: a base of the same names and shapes with other values is another."""

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from convert.adapters import AdapterConfig, write_adapter
from convert.checkpoint import open_checkpoint
from fastjax.errors import ConfigError
from fastjax.runs.identity import Identity, check_identity, model_fingerprint, tensors_fingerprint
from fastjax.runs.opening import open_model
from fastjax.runs.stages import identify
from fastjax.training.config import DataSection, LoraSection, ModelSection, OutputSection, TrainConfig
from tests.support import chat
from tests.support.folders import write_checkpoint


def tensors(folder, arrays, **options):
    write_checkpoint(folder, arrays.items(), {}, **options)
    return open_checkpoint(folder).tensors


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    return {"large": rng.normal(size=(257, 1000)).astype(np.float32), "small": rng.normal(size=7).astype(np.float32)}


def test_equal_tensors_have_one_fingerprint_however_they_are_divided(tmp_path, arrays):
    first = tensors_fingerprint(tensors(tmp_path / "a", arrays))
    shards = tensors(tmp_path / "b", dict(reversed(arrays.items())), max_shard_bytes=100)
    assert len({info.file for info in shards.values()}) == 2
    assert tensors_fingerprint(shards) == first


@pytest.mark.parametrize(
    "change",
    [
        lambda a: {**a, "large": -a["large"]},
        lambda a: {**a, "large": a["large"] + np.float32(1e-6)},
        lambda a: {**a, "small": -a["small"]},
        lambda a: {**a, "small": np.where(np.arange(7) == 3, 0, a["small"]).astype(np.float32)},
        lambda a: {**a, "large": np.where(np.arange(1000) == 999, 0, a["large"]).astype(np.float32)},
        lambda a: {**a, "large": a["large"].view(np.int32)},
        lambda a: {**a, "large": a["large"].reshape(1000, 257)},
        lambda a: {"other": a["large"], "small": a["small"]},
    ],
    ids=["signs", "a merged adapter", "signs of a vector", "an element", "a column", "dtype", "shape", "name"],
)
def test_other_tensors_have_another(tmp_path, arrays, change):
    first = tensors_fingerprint(tensors(tmp_path / "a", arrays))
    assert tensors_fingerprint(tensors(tmp_path / "b", change(arrays))) != first


def test_the_fingerprint_of_a_folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"12")
    first = model_fingerprint(tmp_path)
    (tmp_path / "README.md").write_text("text")
    assert model_fingerprint(tmp_path) == first
    (tmp_path / "model.safetensors").write_bytes(b"123")
    assert model_fingerprint(tmp_path) != first


WHOLE = Identity("model", "data", "weights", "adapter", "adapter_weights", "tokenizer", "held_out")


def test_what_may_not_be_another_is_refused():
    assert check_identity(Path("c/7"), WHOLE, WHOLE) == []
    for name, message in {
        "model": "model.model_name: expected the base model of c/7, got one with another config.json",
        "weights": "model.model_name: expected the base model of c/7, got one whose weights have other values",
        "adapter": "lora.adapter: expected the adapter's settings of c/7, got others",
        "data": "data.train: expected the data of c/7, got other rows",
    }.items():
        with pytest.raises(ConfigError, match=f"^{message}"):
            check_identity(Path("c/7"), WHOLE, WHOLE._replace(**{name: "other"}))


def test_what_may_be_another_is_told():
    other = WHOLE._replace(adapter_weights="other", tokenizer="other", held_out="other")
    found = check_identity(Path("c/7"), WHOLE, other)
    assert [line.split(":")[0] for line in found] == [
        "lora.adapter",
        "the tokenizer or its chat template",
        "data.eval",
    ]
    with pytest.raises(ConfigError, match="lora.adapter: expected the adapter that the run of c/7 began with, its ref"):
        check_identity(Path("c/7"), WHOLE, other, holds_start=True)


def test_what_is_not_known_is_not_compared():
    assert check_identity(Path("c/7"), Identity("model", "data"), WHOLE) == []
    assert check_identity(Path("c/7"), WHOLE, WHOLE._replace(held_out=None)) == []


@pytest.fixture
def run(tmp_path):
    """The identity of a run as its files are now, and these files."""
    base, adapter = chat.write_model(tmp_path / "base"), tmp_path / "adapter"
    config = TrainConfig(
        model=ModelSection(str(base), max_seq_length=48),
        data=DataSection("d"),
        output=OutputSection("o"),
        lora=LoraSection(adapter=str(adapter)),
    )
    data = SimpleNamespace(train=SimpleNamespace(fingerprint="rows"), held_out=None)
    settings = AdapterConfig(r=2, target_modules=["q_proj", "v_proj"])

    def write(sign=1, **changes):
        named = {}
        for module, rows in (("q_proj", 64), ("v_proj", 32)):
            for layer in range(2):
                name = f"layers.{layer}.self_attn.{module}"
                named |= {f"{name}.lora_A": np.full((2, 64), sign), f"{name}.lora_B": np.full((rows, 2), sign)}
        arrays = {name: array.astype(np.float32) for name, array in named.items()}
        shutil.rmtree(adapter, ignore_errors=True)
        adapter.mkdir()
        write_adapter(adapter, dataclasses.replace(settings, **changes), arrays)

    def identity():
        opened = open_model(config)
        run = SimpleNamespace(opened=opened, data=data, tokenizer=opened.tokenizer, start=None)
        identify(run)
        return run.identity

    write()
    return SimpleNamespace(base=base, write=write, identity=identity)


def changed(old, new):
    return {name for name, was, now in zip(Identity._fields, old, new, strict=True) if was != now}


def test_each_file_has_its_fingerprint(run):
    first = run.identity()
    assert first.data == "rows" and (first.held_out, first.start) == (None, None) and None not in first[:-2]
    run.write(sign=-1)
    assert changed(first, run.identity()) == {"adapter_weights"}
    run.write(lora_alpha=3)
    assert changed(first, run.identity()) == {"adapter"}
    run.write(target_modules=["v_proj", "q_proj"], base_model_name_or_path="moved")
    assert changed(first, run.identity()) == set()
    base = open_checkpoint(run.base)
    flipped = [(name, -base.read(name)) for name in base.names]
    write_checkpoint(run.base, flipped, base.config)
    assert changed(first, run.identity()) == {"weights"}


def test_the_tokenizer_has_one_by_its_contents(run):
    first = run.identity()
    file = run.base / "tokenizer.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content, indent=1))
    assert run.identity() == first
    vocab = content["model"]["vocab"]
    one, other = list(vocab)[-2:]
    vocab[one], vocab[other] = vocab[other], vocab[one]
    file.write_text(json.dumps(content))
    assert changed(first, run.identity()) == {"tokenizer"}
