"""Looking into folders, comparing them, quantising them: what a person is told, and that it is so."""

import ml_dtypes
import numpy as np
import pytest

from convert.adapters import AdapterConfig, write_adapter
from convert.checkpoint import open_checkpoint
from convert.errors import ConvertError
from convert.formats import nf4
from convert.inspect import inspect
from convert.quantize import quantize
from convert.verify import compare
from convert.weights import open_weights, stream
from tests.convert.conftest import CONFIG
from tests.support.folders import write_checkpoint


def test_a_model_is_described(make_folder):
    extra = {"rotary_emb.inv_freq": np.zeros(4, np.float32)}
    folder, tensors = make_folder(config=CONFIG | {"head_dim": 10}, extra=extra, max_shard_bytes=9000)
    found = inspect(folder)
    count = sum(array.size for name, array in tensors.items() if "inv_freq" not in name)
    assert (found.kind, found.family, found.parameters, found.tied) == ("model", "llama", count, False)
    assert found.formats == {"bfloat16": (len(tensors) - 1, 2 * count)}
    assert found.files > 1 and found.unsupported == () and found.tokens is None and not found.chat_template
    assert found.ignored == {"rotary_emb.inv_freq": "computed from config.json's RoPE settings"}


def test_what_would_not_be_supported_is_said(make_folder):
    folder, tensors = make_folder(extra={"model.vision.weight": np.zeros(4, np.float16)})
    weights, config = inspect(folder).unsupported
    assert "model.vision.weight" in weights and "head_dim: expected an even number" in config
    write_checkpoint(folder, tensors.items(), CONFIG | {"model_type": "mamba"})
    found = inspect(folder)
    assert "model_type" in found.unsupported[0] and found.parameters is None
    assert found.formats["float16"] == (1, 8)


def test_an_adapter_is_described(tmp_path):
    config = AdapterConfig(r=2, target_modules=["q_proj"], base_model_name_or_path="org/base")
    path = "layers.0.self_attn.q_proj"
    arrays = {f"{path}.lora_A": np.zeros((2, 8), np.float32), f"{path}.lora_B": np.zeros((8, 2), np.float32)}
    write_adapter(tmp_path / "adapter", config, arrays)
    found = inspect(tmp_path / "adapter")
    assert (found.kind, found.family, found.parameters, found.settings["r"]) == ("adapter", "org/base", 32, 2)
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    assert "peft_type" in inspect(tmp_path / "adapter").unsupported[0]


def test_equal_folders_and_different_ones(make_folder, monkeypatch):
    monkeypatch.setattr("convert.verify._LENGTH", 100)
    monkeypatch.setattr("convert.blocks.ELEMENTS", 130)
    first, tensors = make_folder("a", max_shard_bytes=5000)
    second, _ = make_folder("b")
    same = compare(first, second)
    assert same.fits and same.largest == 0 and len(same.tensors) == len(tensors)
    changed = dict(tensors)
    changed["model.norm.weight"] = changed["model.norm.weight"].copy()
    changed["model.norm.weight"][5] += 1
    changed["model.layers.0.mlp.up_proj.weight"] = changed["model.layers.0.mlp.up_proj.weight"].astype(np.float32)
    write_checkpoint(second, changed.items(), CONFIG)
    other = compare(first, second)
    assert not other.fits
    differing = {tensor.name: tensor for tensor in other.tensors if not tensor.equal}
    assert differing.keys() == {"model.norm.weight", "model.layers.0.mlp.up_proj.weight"}
    gap = np.abs(
        changed["model.norm.weight"].astype(np.float32) - tensors["model.norm.weight"].astype(np.float32)
    ).max()
    assert other.largest == differing["model.norm.weight"].largest == gap
    assert differing["model.layers.0.mlp.up_proj.weight"].formats == ("bfloat16", "float32")
    changed["model.norm.weight"][0] = np.nan
    del changed["lm_head.weight"]
    write_checkpoint(second, changed.items(), CONFIG | {"tie_word_embeddings": True})
    other = compare(first, second)
    assert other.missing == ("lm_head.weight",) and other.added == () and np.isnan(other.largest)


def test_shapes_and_families_that_differ(tmp_path):
    config = {"model_type": "unknown"}
    one = {"a": np.zeros((2, 3), np.float32), "b": np.arange(3), "c": np.float32(2.0).reshape(())}
    two = {"a": np.zeros((3, 2), np.float32), "b": np.arange(3) + 2**40, "c": np.float32(2.5).reshape(())}
    write_checkpoint(tmp_path / "a", one.items(), config)
    write_checkpoint(tmp_path / "b", two.items(), config)
    found = {tensor.name: tensor for tensor in compare(tmp_path / "a", tmp_path / "b").tensors}
    assert found["a"].largest is None and not found["a"].equal
    assert found["b"].largest == 2**40 and found["c"].largest == 0.5


@pytest.mark.parametrize("nested", [True, False])
def test_a_quantised_folder(make_folder, tmp_path, nested, monkeypatch):
    monkeypatch.setattr("convert.blocks.ELEMENTS", 128)
    folder, _ = make_folder(max_shard_bytes=5000)
    result = quantize(folder, tmp_path / "out", nested=nested, skip=["o_proj", "layers.1.mlp.up_proj"])
    weights, original = open_weights(tmp_path / "out"), dict(stream(folder))
    assert result.tensors == len(weights.checkpoint.names)
    left = {"model.layers.1.mlp.up_proj", "lm_head", *(f"model.layers.{i}.self_attn.o_proj" for i in range(3))}
    settings = weights.checkpoint.config["quantization_config"]
    assert set(settings["llm_int8_skip_modules"]) == left
    assert settings["bnb_4bit_use_double_quant"] == nested and settings["bnb_4bit_compute_dtype"] == "bfloat16"
    for path, tensor in stream(tmp_path / "out"):
        name = weights.specs[path].name.removesuffix(".weight")
        packed = path.startswith("layers.") and original[path].ndim == 2 and name not in left
        if not packed:
            assert tensor.tobytes() == original[path].tobytes()
            continue
        right = nf4.encode(original[path], nested=nested)
        assert tensor.codes.tobytes() == right.codes.tobytes() and tensor.absmax.tobytes() == right.absmax.tobytes()
        assert nf4.decode(tensor).tobytes() == nf4.decode(right).tobytes()


def test_quantising_what_cannot_be(make_folder, tmp_path):
    folder, tensors = make_folder()
    quantize(folder, tmp_path / "once", dtype="float16")
    assert open_checkpoint(tmp_path / "once").config["torch_dtype"] == "float16"
    assert open_weights(tmp_path / "once").format("norm.weight") == "float16"
    with pytest.raises(ConvertError, match="got NF4: it is quantised already"):
        quantize(tmp_path / "once", tmp_path / "twice")
    with pytest.raises(ConvertError, match="skip: no module is named gate, or ends with it"):
        quantize(folder, tmp_path / "out", skip=["gate"])
    with pytest.raises(ConvertError, match="expected another folder than the one that is read"):
        quantize(folder, folder, force=True)
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = ml_dtypes.bfloat16(np.inf)
    write_checkpoint(folder, tensors.items(), CONFIG)
    with pytest.raises(ConvertError, match=r"up_proj.weight: expected finite values.*NF4 cannot hold them"):
        quantize(folder, tmp_path / "out", allow_nonfinite=True)
