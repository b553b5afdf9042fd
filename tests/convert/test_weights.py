"""The stream and the way back: order, laziness, byte-identity, and names that do not fit."""

import json
import sys
import tracemalloc
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from convert.checkpoint import INDEX, open_checkpoint
from convert.errors import ConvertError
from convert.families import Family, Ignored, family_for
from convert.formats import nf4
from convert.model.spec import QKV
from convert.saving import save
from convert.weights import open_weights, stream
from tests.support.folders import write_checkpoint


def quantized(folder, *, nested=True, keep=(), **options):
    """Rewrite a folder's layer matrices in NF4, except those whose path contains one of `keep`."""

    def tensors():
        for path, array in stream(folder):
            matrix = path.startswith("layers.") and array.ndim == 2 and not any(part in path for part in keep)
            yield path, nf4.encode(array, nested=nested, **options) if matrix else array

    target = folder.parent / f"{folder.name}-nf4"
    save(target, tensors(), source=folder)
    return target


def formats_of(folder):
    opened = open_weights(folder)
    return {path: opened.format(path) for path in opened.specs}


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def same_weights(first, second):
    one, two = open_checkpoint(first), open_checkpoint(second)
    assert one.names == two.names
    for name in one.names:
        assert one.info(name)[:2] == two.info(name)[:2]
        assert one.read(name).tobytes() == two.read(name).tobytes(), name


def test_the_stream_is_in_the_models_order(make_folder, llama_config):
    folder, tensors = make_folder()
    pairs = list(stream(folder))
    rows = family_for(llama_config).specs(llama_config)
    assert [path for path, _ in pairs] == [row.path for row in rows]
    for row, (_, array) in zip(rows, pairs, strict=True):
        assert array.dtype == ml_dtypes.bfloat16 and array.tobytes() == tensors[row.name].tobytes()


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("shards", [False, True])
def test_a_folder_comes_back_byte_for_byte(make_folder, tmp_path, dtype, shards):
    folder, _ = make_folder(dtype=dtype, max_shard_bytes=1000 if shards else 10**9)
    assert (folder / INDEX).exists() == shards
    save(tmp_path / "back", stream(folder), source=folder, max_shard_bytes=1000 if shards else 10**9)
    same_weights(folder, tmp_path / "back")
    expected = files(folder)
    del expected["notes.txt"]
    assert set(files(tmp_path / "back")) == set(expected)
    for name in ("config.json", "tokenizer.json"):
        assert files(tmp_path / "back")[name] == expected[name]
    if not shards:
        assert files(tmp_path / "back") == expected


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("storage_dtype", ["uint8", "bfloat16", "float32"])
def test_an_nf4_folder_comes_back_byte_for_byte(make_folder, tmp_path, nested, storage_dtype):
    folder, _ = make_folder()
    packed = quantized(folder, nested=nested, storage_dtype=storage_dtype)
    formats = formats_of(packed)
    assert formats["layers.1.mlp.up_proj.weight"] == ("nf4-nested" if nested else "nf4")
    assert formats["lm_head.weight"] == formats["layers.1.mlp.up_proj.bias"] == "bfloat16"
    save(tmp_path / "back", stream(packed), source=packed)
    assert files(tmp_path / "back") == files(packed)
    decoded = {path: value for path, value in stream(packed) if isinstance(value, nf4.NF4Tensor)}
    assert len(decoded) == 3 * 7
    for path, original in stream(folder):
        if path in decoded:
            assert np.abs(nf4.decode(decoded[path], np.float32) - original.astype(np.float32)).max() < 0.6


def test_dynamic_folders_are_decided_tensor_by_tensor(make_folder, tmp_path):
    folder, _ = make_folder()
    packed = quantized(folder, keep=("layers.1.self_attn.q_proj", "layers.2.mlp"))
    kinds = formats_of(packed)
    assert kinds["layers.1.self_attn.q_proj.weight"] == kinds["layers.2.mlp.up_proj.weight"] == "bfloat16"
    assert kinds["layers.0.self_attn.q_proj.weight"] == "nf4-nested"
    quantization = json.loads((packed / "config.json").read_text())["quantization_config"]
    assert quantization["bnb_4bit_use_double_quant"] and quantization["bnb_4bit_compute_dtype"] == "bfloat16"
    assert set(quantization["llm_int8_skip_modules"]) == {
        "lm_head",
        "model.layers.1.self_attn.q_proj",
        *(f"model.layers.2.mlp.{name}_proj" for name in ("gate", "up", "down")),
    }
    save(tmp_path / "back", stream(packed), source=packed)
    assert files(tmp_path / "back") == files(packed)


def test_dequantising_drops_the_quantization_config(make_folder, tmp_path):
    folder, _ = make_folder()
    packed = quantized(folder)
    plain = ((path, value if isinstance(value, np.ndarray) else nf4.decode(value)) for path, value in stream(packed))
    save(tmp_path / "plain", plain, source=packed)
    assert json.loads((tmp_path / "plain" / "config.json").read_text()) == open_checkpoint(folder).config
    assert set(formats_of(tmp_path / "plain").values()) == {"bfloat16"}


def test_the_parts_of_an_nf4_weight_share_a_shard(make_folder, tmp_path):
    folder, _ = make_folder()
    packed = quantized(folder)
    save(tmp_path / "back", stream(packed), source=packed, max_shard_bytes=700)
    same_weights(packed, tmp_path / "back")
    homes = json.loads((tmp_path / "back" / INDEX).read_text())["weight_map"]
    for name, home in homes.items():
        base = name.split(".weight")[0] + ".weight"
        assert name.endswith(".bias") or homes[base] == home


def test_one_tensor_in_memory_at_a_time(make_folder, llama_config):
    config = llama_config | {"hidden_size": 512, "intermediate_size": 512, "vocab_size": 512, "num_hidden_layers": 8}
    folder, tensors = make_folder(config=config, dtype=np.float32)
    largest = max(array.nbytes for array in tensors.values())
    total = sum(array.nbytes for array in tensors.values())
    del tensors
    tracemalloc.start()
    for _, array in stream(folder):
        del array
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2.2 * largest < total / 5


def test_rotary_buffers_and_an_equal_tied_head_are_read_past(make_folder, llama_config, tmp_path):
    config = llama_config | {"tie_word_embeddings": True}
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32) for i in range(3)}
    folder, tensors = make_folder(config=config, extra=buffers)
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}
    write_checkpoint(folder, (tensors | head).items(), config)
    assert "lm_head.weight" not in dict(stream(folder))
    head["lm_head.weight"][3, 4] += 1
    write_checkpoint(folder, (tensors | head).items(), config)
    with pytest.raises(ConvertError, match=r"lm_head\.weight: expected a copy of the tied embeddings.*to false"):
        list(stream(folder))


def test_names_that_do_not_fit_are_all_listed(make_folder):
    extra = {"model.layers.0.mlp.router.weight": np.zeros(2, np.float32), "score.weight": np.zeros(2, np.float32)}
    without = ("model.norm.weight", "model.layers.1.mlp.up_proj.bias")
    extra["model.layers.2.self_attn.k_proj.weight"] = np.zeros((20, 24), np.float32)
    extra["model.layers.2.self_attn.v_proj.weight"] = np.zeros((10, 24), np.int8)
    folder, _ = make_folder(extra=extra, without=without)
    with pytest.raises(ConvertError) as caught:
        next(stream(folder))
    for part in (
        str(folder),
        "does not know: model.layers.0.mlp.router.weight, score.weight",
        "missing: model.layers.1.mlp.up_proj.bias, model.norm.weight",
        "model.layers.2.self_attn.k_proj.weight (expected [10, 24] from config.json, got [20, 24] in model.safetensors",
        "model.layers.2.self_attn.v_proj.weight (expected a dtype of float32, bfloat16, float16, got int8",
    ):
        assert part in str(caught.value)


def test_an_nf4_tensor_of_another_shape_or_without_its_scales(make_folder, tmp_path):
    folder, _ = make_folder()
    packed = quantized(folder)
    checkpoint = open_checkpoint(packed)
    tensors = {name: checkpoint.read(name) for name in checkpoint.names}
    name = "model.layers.0.mlp.up_proj.weight"
    other = nf4.to_tensors(name, nf4.encode(np.ones((24, 20), np.float32), nested=True))
    write_checkpoint(packed, (tensors | other).items(), checkpoint.config)
    with pytest.raises(ConvertError, match=rf"{name}: shape: expected \[20, 24\], got \[24, 20\]"):
        list(stream(packed))
    del tensors[name + ".nested_absmax"]
    write_checkpoint(packed, tensors.items(), checkpoint.config)
    with pytest.raises(ConvertError, match=rf"{name} is NF4 and needs {name}\.nested_absmax, which is missing"):
        list(stream(packed))
    write_checkpoint(packed, (tensors | {name + ".SCB": np.zeros(20)}).items(), checkpoint.config)
    with pytest.raises(ConvertError, match=r"does not know: .*up_proj\.weight\.SCB"):
        open_weights(packed)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "gptq"}, "quantization_config.quant_method: expected 'bitsandbytes', 'fp8', 'fbgemm_fp8', "),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "quantization_config.load_in_8bit: expected false"),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
            "quantization_config.bnb_4bit_quant_type: expected 'nf4', got 'fp4'",
        ),
        ("nf4", "quantization_config: expected an object or null, got 'nf4'"),
    ],
)
def test_other_quantisations_are_refused_by_name(make_folder, quantization, message):
    folder, tensors = make_folder()
    config = open_checkpoint(folder).config | {"quantization_config": quantization}
    write_checkpoint(folder, tensors.items(), config)
    with pytest.raises(ConvertError, match=message):
        open_weights(folder)


def test_saving_refuses_what_is_not_the_model(make_folder, tmp_path):
    folder, _ = make_folder()
    pairs = dict(stream(folder))
    for changed, message in [
        ({"layers.0.mlp.router.weight": np.zeros(2)}, r"layers\.0\.mlp\.router\.weight: no such path"),
        ({"norm.weight": np.zeros(25, np.float32)}, r"norm\.weight: shape: expected \[24\], got \[25\]"),
    ]:
        with pytest.raises(ConvertError, match=message):
            save(tmp_path / "out", (pairs | changed).items(), source=folder)
    twice = [*pairs.items(), ("norm.weight", pairs["norm.weight"])]
    with pytest.raises(ConvertError, match=r"norm\.weight: came twice"):
        save(tmp_path / "out", twice, source=folder)
    del pairs["norm.weight"], pairs["layers.1.mlp.up_proj.bias"]
    with pytest.raises(ConvertError, match=r"missing layers\.1\.mlp\.up_proj\.bias, norm\.weight"):
        save(tmp_path / "out", pairs.items(), source=folder)
    with pytest.raises(ConvertError, match="expected a config, or a source folder"):
        save(tmp_path / "out", pairs.items())
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


def test_a_config_of_ones_own(make_folder, tmp_path, llama_config):
    folder, _ = make_folder()
    save(tmp_path / "out", stream(folder), llama_config | {"rope_theta": 7.0}, source=folder)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rope_theta"] == 7.0
    save(tmp_path / "bare", stream(folder), llama_config)
    assert set(files(tmp_path / "bare")) == {"config.json", "model.safetensors"}


def test_a_new_family_is_a_table(make_folder, tmp_path, monkeypatch):
    """Names of its own, no normalisation before the MLP, fused projections, a tensor that is read past."""
    family = Family(
        "other",
        "OtherForCausalLM",
        defaults={"num_key_value_heads": 1},
        constants={"fused": ("self_attn", "mlp"), "mlp_norms": (None, None), "biases": (QKV,)},
        starts={"model.layers.": "h.", "model.embed_tokens": "wte"},
        ignored=(Ignored(r"h\.\d+\.mask", "a constant"),),
    )
    monkeypatch.setitem(sys.modules["convert.families"].FAMILIES, "other", family)
    sizes = {"vocab_size": 3, "hidden_size": 4, "intermediate_size": 5, "num_hidden_layers": 2}
    config = {"model_type": "other", "num_attention_heads": 2, **sizes}
    shapes = {
        "input_layernorm.weight": (4,),
        "self_attn.qkv_proj.weight": (8, 4),
        "self_attn.qkv_proj.bias": (8,),
        "self_attn.o_proj.weight": (4, 4),
        "mlp.gate_up_proj.weight": (10, 4),
        "mlp.down_proj.weight": (4, 5),
    }
    layers = {f"h.{i}.{name}": shape for i in range(2) for name, shape in shapes.items()}
    others = {"wte.weight": (3, 4), "model.norm.weight": (4,), "lm_head.weight": (3, 4), "h.0.mask": (9,)}
    tensors = {
        name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + len(name)
        for name, shape in {**layers, **others}.items()
    }
    write_checkpoint(tmp_path / "other", tensors.items(), config)
    pairs = dict(stream(tmp_path / "other"))
    inside = [f"layers.{i}.{name}" for i in range(2) for name in shapes]
    assert list(pairs) == ["embed_tokens.weight", *inside, "norm.weight", "lm_head.weight"]
    assert np.array_equal(pairs["layers.1.mlp.down_proj.weight"], tensors["h.1.mlp.down_proj.weight"])
    assert family.module_name("layers.1.mlp.down_proj") == "h.1.mlp.down_proj"


def test_formats_are_told_without_reading_tensors(make_folder, monkeypatch):
    folder, _ = make_folder()
    packed = quantized(folder)
    monkeypatch.setattr("convert.checkpoint.read_tensor", None)
    assert len(formats_of(packed)) == len(open_weights(packed).specs)


def test_a_tensor_from_elsewhere_gets_its_state_made(make_folder, tmp_path):
    folder, _ = make_folder()
    packed = quantized(folder)
    bare = (
        (path, replace(value, quant_state=None, storage_shape=None) if isinstance(value, nf4.NF4Tensor) else value)
        for path, value in stream(packed)
    )
    save(tmp_path / "back", bare, source=packed)
    assert files(tmp_path / "back") == files(packed)
