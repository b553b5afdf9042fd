"""Folders: single files, shards and their index, lazily read; every way in which they can be broken."""

import json

import ml_dtypes
import numpy as np
import pytest

from convert import tensor_file
from convert.checkpoint import INDEX, SINGLE, open_checkpoint
from convert.errors import ConvertError
from convert.tensor_file import write_tensor_file
from tests.support.folders import write_checkpoint
from tests.support.full_disk import FullDisk

CONFIG = {"model_type": "llama"}


def tensors():
    rng = np.random.default_rng(1)
    return {
        "a": rng.standard_normal((4, 8)).astype(np.float32),
        "b": rng.standard_normal((16,)).astype(ml_dtypes.bfloat16),
        "c": rng.standard_normal((3, 5)).astype(np.float16),
        "d": rng.integers(0, 255, (64, 1)).astype(np.uint8),
    }


@pytest.fixture
def sharded(tmp_path):
    folder = tmp_path / "model"
    write_checkpoint(folder, tensors().items(), CONFIG, max_shard_bytes=100)
    return folder


def edit_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(("limit", "files"), [(10**9, 1), (200, 2), (100, 3), (1, 4)])
def test_one_file_or_shards_hold_the_same(tmp_path, limit, files):
    folder = tmp_path / "model"
    write_checkpoint(folder, tensors().items(), CONFIG, max_shard_bytes=limit)
    written = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(written) == files
    assert (folder / INDEX).exists() == (files > 1)
    if files > 1:
        assert written[0] == f"model-00001-of-{files:05d}.safetensors"
        assert json.loads((folder / INDEX).read_text())["metadata"]["total_size"] == 128 + 32 + 30 + 64
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config == CONFIG
    assert checkpoint.names == ("a", "b", "c", "d")
    for name, array in tensors().items():
        back = checkpoint.read(name)
        assert back.dtype == array.dtype and back.tobytes() == array.tobytes()
        assert checkpoint.info(name)[:2] == (array.shape, array.dtype.name)
    with pytest.raises(ConvertError, match="model: no tensor z"):
        checkpoint.read("z")


def test_a_second_save_replaces_the_first_ones_shards(sharded):
    (sharded / "metrics.jsonl").write_text("kept")
    write_checkpoint(sharded, {"a": np.zeros(3, np.float32)}.items(), CONFIG)
    assert sorted(path.name for path in sharded.iterdir()) == ["config.json", "metrics.jsonl", SINGLE]
    assert open_checkpoint(sharded).names == ("a",)


def test_a_tensor_that_comes_twice(tmp_path):
    pairs = [("a", np.zeros(2)), ("a", np.zeros(2))]
    with pytest.raises(ConvertError, match="expected every tensor once, got a second a"):
        write_checkpoint(tmp_path / "out", pairs, CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_missing_things_are_named(tmp_path):
    with pytest.raises(ConvertError, match="nowhere: no such folder"):
        open_checkpoint(tmp_path / "nowhere")
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(ConvertError, match=r"config\.json: no such file"):
        open_checkpoint(folder)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ConvertError, match="got a PEFT adapter"):
        open_checkpoint(folder)
    (folder / "config.json").write_text("{}")
    with pytest.raises(ConvertError, match=r"expected model\.safetensors or .*index\.json, got neither"):
        open_checkpoint(folder)
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/x'\ntR.")
    with pytest.raises(ConvertError, match=r"pytorch_model\.bin: pickled weights are never loaded"):
        open_checkpoint(folder)


def test_an_index_that_names_what_a_shard_lacks(sharded):
    edit_index(sharded, lambda index: index["weight_map"].update(e="model-00001-of-00003.safetensors"))
    with pytest.raises(ConvertError, match=r"model-00001-of-00003\.safetensors: .*index\.json names, missing e"):
        open_checkpoint(sharded)


def test_a_tensor_outside_the_index_is_seen(sharded):
    edit_index(sharded, lambda index: index["weight_map"].pop("c"))
    assert open_checkpoint(sharded).names == ("a", "b", "c", "d")


def test_a_tensor_outside_the_index_in_two_shards(sharded):
    for shard in ("model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors"):
        names = {"c": tensors()["c"], "d": tensors()["d"], "b": tensors()["b"], "x": np.zeros(1)}
        write_tensor_file(sharded / shard, names)
    with pytest.raises(ConvertError, match=r"x is not in .*index\.json and also in"):
        open_checkpoint(sharded)


@pytest.mark.parametrize(
    "shard",
    ["../model.safetensors", "/etc/passwd", "sub/a.safetensors", "a.bin", "..", "", "a\\b.safetensors", 3, None],
)
def test_an_index_that_points_elsewhere(sharded, shard):
    edit_index(sharded, lambda index: index["weight_map"].update(a=shard))
    with pytest.raises(ConvertError, match=r"weight_map\['a'\]: expected the plain name of a \.safetensors file"):
        open_checkpoint(sharded)


def test_an_index_that_names_a_shard_too_long_for_a_file(sharded):
    edit_index(sharded, lambda index: index["weight_map"].update(a=f"{'s' * 300}.safetensors"))
    with pytest.raises(ConvertError, match="weight_map: expected every shard beside the index, missing s{50}"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("weight_map", [None, {}, [], "a"])
def test_an_index_without_a_map(sharded, weight_map):
    edit_index(sharded, lambda index: index.update(weight_map=weight_map))
    with pytest.raises(ConvertError, match="weight_map: expected an object"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("room", [0, 50, 250, 400])
def test_a_disk_that_fills_leaves_the_earlier_save(tmp_path, sharded, monkeypatch, room):
    before = {path.name: path.read_bytes() for path in sharded.iterdir()}
    monkeypatch.setattr(tensor_file, "open", lambda file, mode: FullDisk(file, mode, room), raising=False)
    other = {name: array + array.dtype.type(1) for name, array in tensors().items()}
    for target in (sharded, tmp_path / "new"):
        with pytest.raises(OSError, match="No space left.*nothing half-written") as caught:
            write_checkpoint(target, other.items(), CONFIG)
        assert caught.value.filename == str(target)
    assert {path.name: path.read_bytes() for path in sharded.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
