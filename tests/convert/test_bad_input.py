"""Whatever is wrong with a folder, it is said with the file's name: nothing crashes, hangs, or takes the memory."""

import json
import shutil
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from convert.adapters import AdapterConfig, write_adapter
from convert.checkpoint import INDEX
from convert.errors import ConvertError
from convert.inspect import inspect
from convert.merge import merge
from convert.quantize import quantize
from convert.verify import compare
from convert.weights import open_weights

TARGET = "layers.0.self_attn.q_proj"


@pytest.fixture
def folders(make_folder, tmp_path):
    """(base in shards, adapter)"""
    base, _ = make_folder(max_shard_bytes=6000)
    config = AdapterConfig(r=2, target_modules=["q_proj"], layers_to_transform=[0])
    arrays = {f"{TARGET}.lora_A": np.ones((2, 24), np.float32), f"{TARGET}.lora_B": np.ones((20, 2), np.float32)}
    write_adapter(tmp_path / "adapter", config, arrays)
    return base, tmp_path / "adapter"


def shards(folder):
    return sorted(folder.glob("model-*.safetensors"))


def swap(base):
    first, second = shards(base)[:2]
    first.rename(base / "x")
    second.rename(first)
    (base / "x").rename(second)


def duplicate(base):
    first, second = shards(base)[:2]
    shutil.copyfile(first, second)


def truncate(base):
    with open(shards(base)[1], "r+b") as stream:
        stream.truncate(shards(base)[1].stat().st_size // 2)


def empty(base):
    shards(base)[0].write_bytes(b"")


def edit_index(change):
    def edit(base):
        index = json.loads((base / INDEX).read_text())
        change(index["weight_map"])
        (base / INDEX).write_text(json.dumps(index))

    return edit


def pickle_instead(base):
    for file in [*shards(base), base / INDEX]:
        file.unlink()
    (base / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/pwned'\ntR.")


FAULTS = {
    "reordered": (swap, "expected the tensors that .* names, missing"),
    "duplicated": (duplicate, "expected the tensors that .* names, missing"),
    "truncated": (truncate, "is the file whole"),
    "empty": (empty, "is the file whole"),
    "missing": (lambda base: shards(base)[2].unlink(), "expected every shard beside the index, missing"),
    "traversal": (
        edit_index(lambda m: m.update({next(iter(m)): "../adapter/adapter_model.safetensors"})),
        "plain name",
    ),
    "absolute": (edit_index(lambda m: m.update({next(iter(m)): "/etc/passwd.safetensors"})), "plain name"),
    "pickle": (pickle_instead, "pickled weights are never loaded"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_a_base(folders, tmp_path, name):
    base, adapter = folders
    fault, message = FAULTS[name]
    fault(base)
    for attempt in (
        lambda: merge(base, adapter, tmp_path / "out"),
        lambda: quantize(base, tmp_path / "out"),
        lambda: inspect(base),
        lambda: compare(base, base),
    ):
        with pytest.raises(ConvertError, match=message) as caught:
            attempt()
        assert str(base) in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "model"]


def test_an_adapter_that_is_a_pickle(folders, tmp_path):
    base, adapter = folders
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(ConvertError, match="pickles are never loaded"):
        merge(base, adapter, tmp_path / "out")


def test_a_header_that_promises_much_takes_no_memory(tmp_path):
    """A length of 2⁶⁰ in a file of a few bytes."""
    huge = (2**60).to_bytes(8, "little")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(huge + b"{}")
    tracemalloc.start()
    with pytest.raises(ConvertError, match=r"model\.safetensors"):
        inspect(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


BYTES = st.sampled_from([*b'{}[]",:0129-eE. \\nultrfas_', 0, 0x80, 0xFF])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_change_of_a_byte_crashes_a_merge(folders, tmp_path_factory, data):
    """Config, index, headers, adapter settings: a merge succeeds or says which file is wrong."""
    place = tmp_path_factory.mktemp("fuzz")
    base, adapter = (shutil.copytree(folder, place / folder.name) for folder in folders)
    files = [base / "config.json", base / INDEX, shards(base)[0], adapter / "adapter_config.json"]
    file = data.draw(st.sampled_from([*files, adapter / "adapter_model.safetensors"]))
    raw = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, min(len(raw), 1500) - 1))] = data.draw(BYTES)
    file.write_bytes(raw)
    try:
        merge(base, adapter, place / "out")
    except ConvertError as error:
        assert str(place) in str(error)
        assert not (place / "out").exists()
    else:
        open_weights(place / "out")
    shutil.rmtree(place)
