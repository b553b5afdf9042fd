"""Experts in files: a tensor an expert, all in one, gpt-oss's by turns and in MXFP4; one stacked weight in the tree."""

import re

import ml_dtypes
import numpy as np
import pytest

from convert.adapter_config import AdapterConfig
from convert.adapters import write_adapter
from convert.checkpoint import open_checkpoint
from convert.errors import ConvertError
from convert.families import family_for
from convert.formats import mxfp4, nf4
from convert.formats.fp8 import FP8
from convert.inspect import inspect
from convert.merge import merge
from convert.model.paths import WeightPath
from convert.quantize import quantize
from convert.saving import save
from convert.verify import compare
from convert.weights import open_weights, stream
from tests.support.family_mixtures import MIXTURES
from tests.support.folders import write_checkpoint
from tests.support.tiny import arrays, write_fp8_folder

#: Name of an expert's projection in files -> what it is.
PARTS = {"w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "down_proj": "down", "up_proj": "up"}


def write(folder, config, tensors):
    write_checkpoint(folder, tensors.items(), config)
    return folder


def merged(tensors):
    """A folder's arrays in the names and layout of transformers 5's classes."""
    found, experts = {}, {}
    for name, array in tensors.items():
        one = re.fullmatch(r"(.*)\.(mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight", name)
        if one is None:
            found[name.replace("block_sparse_moe", "mlp")] = array
        else:
            experts.setdefault(one[1], {})[PARTS[one[4]], int(one[3])] = array
    for start, own in experts.items():
        parts = (np.stack([own[part, number] for number in range(len(own) // 3)]) for part in ("gate", "up", "down"))
        gate, up, down = parts
        both = np.concatenate([gate, up], axis=1)
        found |= {f"{start}.mlp.experts.gate_up_proj": both, f"{start}.mlp.experts.down_proj": down}
    return found


def in_mxfp4(tensors, seed=0):
    """gpt-oss's arrays with random experts in MXFP4, and the same decoded by the format's definition."""
    rng, packed, plain = np.random.default_rng(seed), {}, {}
    numbers = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    table = np.array([*numbers, *(-number for number in numbers)], np.float32)
    for name, array in tensors.items():
        if not name.endswith((".gate_up_proj", ".down_proj")):
            packed[name] = plain[name] = array
            continue
        experts, into, out = array.shape
        nibbles = rng.integers(0, 16, (experts, out, into // 32, 32)).astype(np.uint8)
        scales = rng.integers(120, 127, (experts, out, into // 32)).astype(np.uint8)
        values = table[nibbles] * 2.0 ** (scales[..., None].astype(np.float32) - 127)
        packed |= {f"{name}_blocks": nibbles[..., ::2] | nibbles[..., 1::2] << 4, f"{name}_scales": scales}
        plain[name] = values.reshape(experts, out, into).swapaxes(1, 2).astype(ml_dtypes.bfloat16)
    return packed, plain


def in_bfloat16(tensors):
    return {name: array.astype(ml_dtypes.bfloat16) for name, array in tensors.items()}


@pytest.mark.parametrize("family", MIXTURES)
def test_one_stacked_weight_and_the_folder_again(family, tmp_path):
    config = MIXTURES[family]
    folder = write(tmp_path / "model", config, arrays(config))
    weights = open_weights(folder)
    found = dict(stream(folder))
    assert {path: array.shape for path, array in found.items()} == {
        path: row.shape for path, row in weights.specs.items()
    }
    path = next(path for path in found if "experts.gate_proj.weight" in path)
    for path, array in found.items():
        blocks = np.concatenate([block.reshape(-1) for block in weights.blocks(path)()])
        assert np.array_equal(blocks, array.reshape(-1)), path
    save(tmp_path / "saved", reversed(found.items()), source=folder)
    before, after = (open_checkpoint(place) for place in (folder, tmp_path / "saved"))
    assert set(before.names) == set(after.names)
    assert all(before.read(name).tobytes() == after.read(name).tobytes() for name in before.names)
    assert compare(folder, tmp_path / "saved").fits and inspect(folder).unsupported == ()


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_the_merged_layout_is_the_same_model(family, tmp_path):
    config = MIXTURES[family]
    tensors = arrays(config)
    apart = write(tmp_path / "apart", config, tensors)
    together = write(tmp_path / "together", config, merged(tensors))
    first, second = (dict(stream(folder)) for folder in (apart, together))
    assert first.keys() == second.keys() and all(np.array_equal(first[path], second[path]) for path in first)
    result = compare(apart, together)
    assert not result.missing and not result.added and result.largest == 0
    save(tmp_path / "saved", second.items(), source=together)
    assert set(open_checkpoint(tmp_path / "saved").names) == set(merged(tensors))
    for folder in (apart, together):
        quantize(folder, tmp_path / f"{folder.name}-4bit")
    assert compare(tmp_path / "apart-4bit", tmp_path / "together-4bit").largest == 0


def test_experts_are_quantised_one_by_one(tmp_path):
    """Each by bitsandbytes' layout for its own matrix; router and a shared expert's gate stay."""
    config = MIXTURES["qwen2_moe"]
    tensors = in_bfloat16(arrays(config))
    quantize(write(tmp_path / "model", config, tensors), tmp_path / "packed")
    weights = open_weights(tmp_path / "packed")
    packed = {path for path in weights.specs if weights.format(path) == "nf4-nested"}
    kinds = {row.kind for path, row in weights.specs.items() if path not in packed}
    assert kinds == {"table", "norm", "router", "gate"} and {weights.specs[path].kind for path in packed} == {
        "matrix",
        "experts",
    }
    path = "layers.3.mlp.experts.down_proj.weight"
    stacked = weights.read(path)
    assert stacked.shape == weights.specs[path].shape and len(stacked.tensors) == 4
    for number, tensor in enumerate(stacked.tensors):
        own = nf4.encode(tensors[f"model.layers.3.mlp.experts.{number}.down_proj.weight"], nested=True)
        assert np.array_equal(tensor.codes, own.codes) and np.array_equal(tensor.absmax, own.absmax)
        assert np.array_equal(weights.read(path, packed=False)[number], nf4.decode(own))
    skipped = weights.checkpoint.config["quantization_config"]["llm_int8_skip_modules"]
    assert "model.layers.3.mlp.shared_expert_gate" in skipped and not any("experts" in name for name in skipped)
    save(tmp_path / "saved", weights.stream(), source=tmp_path / "packed")
    assert compare(tmp_path / "packed", tmp_path / "saved").largest == 0

    quantize(tmp_path / "model", tmp_path / "without", skip=["experts"])
    left = open_weights(tmp_path / "without")
    assert (
        left.format(path) == "bfloat16" and left.format("layers.3.mlp.shared_expert.down_proj.weight") == "nf4-nested"
    )
    assert "model.layers.3.mlp.experts" in left.checkpoint.config["quantization_config"]["llm_int8_skip_modules"]


def test_experts_in_fp8(tmp_path):
    """One by one with scales of blocks, as the published FP8 folders have them."""
    config = MIXTURES["qwen3_moe"]
    (tmp_path / "model").mkdir()
    weights = open_weights(write_fp8_folder(tmp_path / "model", config, (16, 16)))
    path = "layers.3.mlp.experts.gate_proj.weight"
    stacked, values = weights.read(path, packed=True), weights.read(path)
    assert stacked.shape == values.shape == (4, 12, 32) and weights.format(path) == "fp8"
    for number, tensor in enumerate(stacked.tensors):
        assert np.array_equal(FP8.decode(tensor), values[number])
        blocks = np.concatenate(list(weights.blocks(path, number)()))
        assert np.array_equal(blocks, values[number])
    quantize(tmp_path / "model", tmp_path / "packed")
    expected = np.stack([nf4.decode(nf4.encode(expert, nested=True)) for expert in values])
    assert np.array_equal(open_weights(tmp_path / "packed").read(path, packed=False), expected)


def test_mxfp4_folders(tmp_path):
    config = MIXTURES["gpt_oss"] | {
        "hidden_size": 64,
        "quantization_config": {"quant_method": "mxfp4"},
        "dtype": "bfloat16",
    }
    packed, plain = in_mxfp4(in_bfloat16(arrays(config)))
    folder = write(tmp_path / "packed", config, packed)
    other = write(tmp_path / "plain", {**config, "quantization_config": None}, plain)
    weights = open_weights(folder)
    path = "layers.1.mlp.experts.up_proj.weight"
    assert weights.format(path) == "mxfp4" and weights.specs[path].shape == (4, 64, 64)
    assert isinstance(weights.read(path), mxfp4.MXFP4Tensor)
    first, second = (dict(stream(place, packed=False)) for place in (folder, other))
    assert first.keys() == second.keys() and all(np.array_equal(first[path], second[path]) for path in first)
    found = inspect(folder)
    assert found.formats["mxfp4"][0] == 8 and found.unsupported == () and compare(folder, other).largest == 0
    a, b = np.ones((4, 1, 64), np.float32), np.full((4, 64, 1), 0.5, np.float32)
    down = WeightPath.parse("layers.1.mlp.experts.down_proj")
    adapter = AdapterConfig(r=1, lora_alpha=1, target_parameters=["layers.1.mlp.experts.down_proj"])
    arrays_of = {down.with_leaf("lora_A"): a, down.with_leaf("lora_B"): b}
    write_adapter(tmp_path / "adapter", adapter, arrays_of, family=weights.family)
    for place in (folder, other):
        merge(place, tmp_path / "adapter", tmp_path / f"merged-{place.name}")
    merged = open_weights(tmp_path / "merged-packed")
    assert {form.name for form in merged.formats()} == {"bfloat16"}
    assert compare(tmp_path / "merged-packed", tmp_path / "merged-plain").largest == 0
    change = merged.read(down.with_leaf("weight")).astype(np.float32) - first[down.with_leaf("weight")].astype(
        np.float32
    )
    assert np.abs(change - 0.5).max() < 0.02  # bfloat16, values of up to 6 / 2
    save(tmp_path / "saved", weights.stream(), source=folder)
    assert compare(folder, tmp_path / "saved").fits and compare(folder, tmp_path / "saved").largest == 0
    for place in (folder, other):
        with pytest.raises(
            ConvertError, match="MXFP4: it is quantised already|gpt_oss has no tensors of single experts"
        ):
            quantize(place, tmp_path / "nf4")
    quantize(other, tmp_path / "nf4", skip=["experts"])
    assert {form.name for form in open_weights(tmp_path / "nf4").formats()} == {"bfloat16", "nf4-nested"}


def test_mxfp4_values_and_encoding():
    """Decoded as the specification's numbers; encoded and decoded again they are the same."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (3, 5, 2, 16)).astype(np.uint8)
    scales = rng.integers(0, 253, (3, 5, 2)).astype(np.uint8)  # 4 · 2¹²⁶ is infinite in float32
    tensor = mxfp4.MXFP4Tensor(codes, scales, "float32")
    values = mxfp4.MXFP4.decode(tensor)
    again = mxfp4.encode(values)
    assert values.shape == tensor.shape == (3, 5, 64) and np.array_equal(mxfp4.MXFP4.decode(again), values)
    rounded = mxfp4.encode(np.array([[[*np.linspace(-6.9, 6.9, 31), 7.5]]], np.float32))
    error = mxfp4.MXFP4.decode(rounded)[0, 0] - np.array([*np.linspace(-6.9, 6.9, 31), 7.5])
    assert rounded.scales[0, 0, 0] == 127 and np.abs(error).max() <= 1.5  # beyond 6 the nearest is 6
    with pytest.raises(ConvertError, match="rows of whole blocks of 32, got 40 values"):
        mxfp4.encode(np.zeros((1, 1, 40), np.float32))
    with pytest.raises(ConvertError, match="expected finite values"):
        mxfp4.encode(np.full((1, 1, 32), np.nan, np.float32))


def test_what_is_wrong_with_experts_is_named(tmp_path):
    config = MIXTURES["mixtral"]
    tensors, start = arrays(config), "model.layers.1.block_sparse_moe.experts."
    broken = {name: array for name, array in tensors.items() if name != f"{start}2.w1.weight"}
    broken |= {
        f"{start}4.w1.weight": tensors[f"{start}2.w1.weight"],
        f"{start}1.w2.weight": np.zeros((3, 4), np.float32),
    }
    broken[f"{start}3.w3.weight"] = tensors[f"{start}3.w3.weight"].astype(np.float16)
    with pytest.raises(ConvertError) as error:
        open_weights(write(tmp_path / "broken", config, broken))
    for part in (
        f"does not know: {start}4.w1.weight",
        f"missing: {start}2.w1.weight",
        rf"{start}1.w2.weight (expected [32, 44] from config.json, got [3, 4]",
        f"{start}3.w3.weight (expected float32 as for the other experts, got float16)",
    ):
        assert part in str(error.value)
    with pytest.raises(ConvertError, match="number of experts: expected at most"):
        open_weights(write(tmp_path / "many", config | {"num_local_experts": 8000}, tensors))
    oss = MIXTURES["gpt_oss"] | {"hidden_size": 64}
    packed, _ = in_mxfp4(arrays(oss))
    name = next(name for name in packed if name.endswith("down_proj_scales"))
    with pytest.raises(ConvertError, match=r"expected \[4, 64, 64\] in blocks of 32, got .* with scales \[4, 64, 1\]"):
        open_weights(write(tmp_path / "short", oss, packed | {name: packed[name][..., :1]}))


@pytest.mark.parametrize(
    ("family", "beside"),
    [("glm4_moe", "layers.4.mlp.experts.0.up_proj"), ("deepseek_v32", "layers.2.self_attn.indexer.wq_b")],
)
def test_a_folder_is_cast_tensor_by_tensor(family, beside, tmp_path):
    """Without a change to any expert; the module that predicts further tokens, or an indexer, goes along."""
    config = MIXTURES[family]
    further = {f"model.{beside}.weight": np.ones((2, 2), np.float32)}
    folder = write(tmp_path / "model", config, arrays(config) | further)
    spec = open_weights(folder).specs["layers.2.self_attn.o_proj.weight"]
    a, b = np.ones((2, spec.shape[1]), np.float32), np.ones((spec.shape[0], 2), np.float32)
    paths = {spec.path.with_leaf("lora_A"): a, spec.path.with_leaf("lora_B"): b}
    adapter = AdapterConfig(r=2, target_modules=["layers.2.self_attn.o_proj"])
    write_adapter(tmp_path / "adapter", adapter, paths, family=family_for(config))
    for dtype, wanted in (("bfloat16", {"bfloat16"}), ("nf4", {"float32", "nf4-nested"})):
        merge(folder, tmp_path / "adapter", tmp_path / dtype, dtype=dtype)
        after = open_weights(tmp_path / dtype)
        found = {path: after.format(path) for path in after.specs}
        assert {found.pop(path) for path in list(found) if path.endswith(".choice_bias")} == {"float32"}
        assert set(found.values()) == wanted
        assert after.checkpoint.read(next(iter(further))).shape == (2, 2)
