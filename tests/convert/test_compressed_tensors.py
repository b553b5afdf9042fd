"""Folders in the formats of compressed-tensors: values by each format's definition, merges, faults, transformers."""

import json

import ml_dtypes
import numpy as np
import pytest

from convert.adapter_config import AdapterConfig
from convert.adapters import write_adapter
from convert.errors import ConvertError
from convert.families import family_for
from convert.inspect import inspect
from convert.merge import merge
from convert.quantization_aware import QuantizationAware
from convert.quantize import quantize
from convert.verify import compare
from convert.weights import open_weights, stream
from tests.convert.conftest import CONFIG as LLAMA
from tests.support.folders import lora_arrays, write_checkpoint
from tests.support.served import SCHEMES, values_of

CONFIG = LLAMA | {"hidden_size": 128, "intermediate_size": 384, "head_dim": 32, "num_hidden_layers": 1}
CONFIG |= {"num_key_value_heads": 1, "dtype": "bfloat16"}
GROUPS = {"q_proj": ("q", "k", "v"), "k_proj": ("q", "k", "v"), "v_proj": ("q", "k", "v")}
GROUPS |= {"gate_proj": ("gate", "up"), "up_proj": ("gate", "up")}
LEFT = "layers.0.self_attn.o_proj"


def hostile(matrix):
    """Rows of zeros, of numbers below every scale, of ties, and with an outlier."""
    matrix[1] = 0
    matrix[2] *= 1e-36
    matrix[3, ::2] = -0.0
    matrix[4] = np.round(4 * matrix[4]) / 8
    matrix[5, 7] = 100
    return matrix


@pytest.fixture
def folder(make_folder):
    folder, tensors = make_folder(config=CONFIG)
    for name, array in tensors.items():
        tensors[name] = hostile(array) if name.endswith("proj.weight") else array
    write_checkpoint(folder, tensors.items(), CONFIG)
    return folder


def expected(original, path, scheme):
    part = path.split(".")[-2]
    peers = [path.replace(part, f"{name}_proj") for name in GROUPS.get(part, (part.removesuffix("_proj"),))]
    top = max(np.abs(original[peer].astype(np.float32)).max() for peer in peers)
    return values_of(original[path].astype(np.float32), scheme, np.dtype(ml_dtypes.bfloat16), top)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_values_are_those_of_the_definition(folder, tmp_path, scheme, monkeypatch):
    monkeypatch.setattr("convert.blocks.ELEMENTS", 2048)
    quantize(folder, tmp_path / "out", scheme=scheme, skip=[LEFT])
    weights, original = open_weights(tmp_path / "out"), dict(stream(folder))
    settings = weights.checkpoint.config["quantization_config"]
    assert settings["ignore"] == ["lm_head", f"model.{LEFT}"] and settings["quant_method"] == "compressed-tensors"
    packed = [path for path in weights.specs if weights.format(path) != "bfloat16"]
    assert len(packed) == 6 and all(weights.scheme(weights.specs[path].name) == scheme for path in packed)
    for path, tensor in weights.stream(packed=False):
        right = expected(original, path, scheme) if path in packed else original[path].astype(np.float32)
        assert np.array_equal(tensor.astype(np.float32), right)
        assert np.array_equal(np.concatenate(list(weights.blocks(path)())).reshape(right.shape), right)
    found = inspect(tmp_path / "out")
    assert not found.unsupported and found.formats[weights.format(packed[0])][0] == 6
    assert compare(tmp_path / "out", tmp_path / "out").largest == 0 and compare(folder, tmp_path / "out").fits
    with pytest.raises(ConvertError, match="it is quantised already"):
        quantize(tmp_path / "out", tmp_path / "again", scheme=scheme)


#: scheme, inputs, then what the folder says: format, what servers make of inputs, suffixes of a matrix's tensors.
SERVED = [
    ("int4-32", "none", "pack-quantized", None, {"weight_packed", "weight_scale", "weight_shape"}),
    ("int4-32", "int8", "int-quantized", ("int", "token"), {"weight", "weight_scale"}),
    ("int4-128", "fp8", "pack-quantized", ("float", "token"), {"weight_packed", "weight_scale", "weight_shape"}),
    ("int8", "int8", "int-quantized", ("int", "token"), {"weight", "weight_scale"}),
    ("int8", "none", "pack-quantized", None, {"weight_packed", "weight_scale", "weight_shape"}),
    ("fp8-row", "none", "float-quantized", None, {"weight", "weight_scale"}),
    ("fp8-tensor", "fp8", "float-quantized", ("float", "token"), {"weight", "weight_scale"}),
    ("fp8-block", "fp8-128", "float-quantized", ("float", "group"), {"weight", "weight_scale"}),
    ("mxfp4", "fp8-128", "mxfp4-pack-quantized", ("float", "group"), {"weight_packed", "weight_scale"}),
]


@pytest.mark.parametrize(("scheme", "activations", "form", "inputs", "suffixes"), SERVED)
def test_a_folder_says_what_inputs_become_and_has_the_same_values(
    folder, adapter, tmp_path, scheme, activations, form, inputs, suffixes
):
    quantize(folder, tmp_path / "usual", scheme=scheme)
    quantize(folder, tmp_path / "out", scheme=scheme, activations=activations)
    usual, found = open_weights(tmp_path / "usual"), open_weights(tmp_path / "out")
    settings = found.checkpoint.config["quantization_config"]
    said = settings["config_groups"]["group_0"]["input_activations"]
    assert settings["format"] == form and (said and (said["type"], said["strategy"])) == inputs
    names = {name.rpartition(".")[2] for name in found.checkpoint.names if "q_proj.weight" in name}
    assert names == suffixes and found.formats()[-1].label == usual.formats()[-1].label
    right = dict(usual.stream(packed=False))
    for path, tensor in found.stream(packed=False):
        assert np.array_equal(tensor, right[path]), path
        blocks = np.concatenate(list(found.blocks(path)())).reshape(tensor.shape)
        assert np.array_equal(blocks, tensor.astype(np.float32)), path
    assert not inspect(tmp_path / "out").unsupported

    # As the folder of an adapter says, without being told; into such a base it is merged by its values.
    QuantizationAware(scheme, None if activations == "none" else activations).write(adapter)
    merged = merge(folder, adapter, tmp_path / "merged", dtype=scheme)
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["quantization_config"] == settings and not any("trained" in note for note in merged.notes)
    merge(tmp_path / "out", adapter, tmp_path / "again", dtype=scheme)
    merge(tmp_path / "usual", adapter, tmp_path / "plain")
    merge(tmp_path / "out", adapter, tmp_path / "decoded")
    assert compare(tmp_path / "plain", tmp_path / "decoded").largest == 0
    assert QuantizationAware.read(tmp_path / "decoded") == QuantizationAware.read(adapter)
    assert QuantizationAware.read(tmp_path / "merged") is None


def test_what_is_not_as_it_was_trained_is_said(folder, adapter, tmp_path):
    QuantizationAware("nvfp4", "nvfp4", ("o_proj",)).write(adapter)
    one, two = merge(folder, adapter, tmp_path / "out", dtype="nvfp4").notes
    assert "trained with inputs in nvfp4" in one and "written for inputs in 16 bits" in one
    assert "trained with o_proj left out" in two and "with nothing left out" in two
    (note,) = merge(folder, adapter, tmp_path / "other", dtype="int8", skip=["o_proj"]).notes
    assert note == "adapter was trained for nvfp4 (quantization_aware.json), not for int8"
    with pytest.raises(ConvertError, match="one of those that nvfp4 is served with: none, got 'int8'"):
        merge(folder, adapter, tmp_path / "no", dtype="nvfp4", activations="int8")
    with pytest.raises(ConvertError, match="activations: expected none, unless dtype is one of nf4"):
        merge(folder, adapter, tmp_path / "no", activations="int8")
    quantize(folder, tmp_path / "bytes", scheme="int4-32", activations="int8")
    tensors = raw(tmp_path / "bytes")
    tensors["model.layers.0.self_attn.q_proj.weight"][0, 0] = 9
    config = open_weights(tmp_path / "bytes").checkpoint.config
    write_checkpoint(tmp_path / "bad", tensors.items(), config)
    with pytest.raises(ConvertError, match=r"q_proj.weight: expected codes from -8 to 7, got '-8 to 9'"):
        list(open_weights(tmp_path / "bad").stream())


@pytest.fixture
def adapter(tmp_path):
    """On queries and the MLP's last matrix; keys and values stay."""
    settings = AdapterConfig(r=2, target_modules=["q_proj", "down_proj"])
    specs = family_for(CONFIG).specs(CONFIG)
    write_adapter(tmp_path / "adapter", settings, lora_arrays(settings, ((spec.path, spec.shape) for spec in specs)))
    return tmp_path / "adapter"


def contents(folder):
    return {name: array.tobytes() for name, array in raw(folder).items()}


def raw(folder):
    checkpoint = open_weights(folder).checkpoint
    return {name: checkpoint.read(name) for name in checkpoint.names}


@pytest.mark.exhaustive("int4-32-zeros", "fp8-tensor", "fp8-block", "nvfp4", "mxfp4")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_merging_into_a_scheme_is_merging_and_quantising(folder, adapter, tmp_path, scheme):
    merge(folder, adapter, tmp_path / "plain")
    quantize(tmp_path / "plain", tmp_path / "two")
    quantize(tmp_path / "plain", tmp_path / "both", scheme=scheme)
    merge(folder, adapter, tmp_path / "once", dtype=scheme)
    assert contents(tmp_path / "once") == contents(tmp_path / "both") != contents(tmp_path / "two")
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("once", "both")]
    assert configs[0] == configs[1]

    quantize(folder, tmp_path / "base", scheme=scheme)
    merge(tmp_path / "base", adapter, tmp_path / "merged", dtype=scheme)
    merge(tmp_path / "base", adapter, tmp_path / "decoded")
    base, merged = contents(tmp_path / "base"), open_weights(tmp_path / "merged")
    quantized = {f"model.{path.removesuffix('.weight')}" for path in merged.specs if path.endswith("proj.weight")}
    again = {name.rpartition(".")[0] for name, array in contents(tmp_path / "merged").items() if array != base[name]}
    shared = {"k_proj", "v_proj"} if scheme in ("nvfp4", "fp8-tensor") else set()
    assert {name.rpartition(".")[2] for name in again} - shared == {"q_proj", "down_proj"} and again < quantized
    decoded = dict(stream(tmp_path / "decoded"))
    for path in ("layers.0.self_attn.q_proj.weight", "layers.0.mlp.down_proj.weight"):
        assert np.array_equal(merged.read(path, packed=False).astype(np.float32), expected(decoded, path, scheme))
    assert inspect(tmp_path / "decoded").formats.keys() == {"bfloat16"}


def test_what_cannot_be_quantised(make_folder, folder, tmp_path):
    narrow, tensors = make_folder("narrow", config=CONFIG | {"intermediate_size": 96})
    with pytest.raises(
        ConvertError, match=r"down_proj.weight: expected rows of whole groups of 128 for int4-128.*got 96"
    ):
        quantize(narrow, tmp_path / "out", scheme="int4-128")
    quantize(narrow, tmp_path / "out", scheme="int4-128", skip=["down_proj"])
    for scheme, match in (("int3", "scheme: expected one of nf4, int4-32"), ("int8", "nested: expected true")):
        with pytest.raises(ConvertError, match=match):
            quantize(folder, tmp_path / "no", scheme=scheme, nested=False)
    tensors["model.layers.0.mlp.up_proj.weight"][3, 3] = np.nan
    write_checkpoint(narrow, tensors.items(), CONFIG | {"intermediate_size": 96})
    for scheme in ("int8", "nvfp4"):
        with pytest.raises(ConvertError, match=r"_proj.weight: expected finite values.*cannot hold them"):
            quantize(narrow, tmp_path / "no", scheme=scheme, allow_nonfinite=True)
    assert not (tmp_path / "no").exists()


FAULTS = {
    "a rotation": ({"transform_config": {"config_groups": {"a": 1}}}, {}, "transform_config: expected nothing"),
    "sparse": ({"sparsity_config": {"format": "sparse-24-bitmask"}}, {}, "sparsity_config: expected nothing"),
    "2 bits": ({"weights": {"num_bits": 2}}, {}, "group_0.weights: expected .* got '2 bits of type int'"),
    "reordered": ({"weights": {"actorder": "group"}}, {}, "actorder: expected none"),
    "codes": ({}, {"weight_packed": np.zeros((128, 8), np.int32)}, r"weight_packed: expected int32 \[128, 16\], got"),
    "scales": ({}, {"weight_scale": np.zeros((128, 3), np.float32)}, r"weight_scale: expected float32 or .* got"),
    "no scales": ({}, {"weight_scale": None}, "weight_scale is missing"),
    "an order": ({}, {"weight_g_idx": np.zeros(128, np.int32)}, "does not know: .*q_proj.weight_g_idx"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(folder, tmp_path, fault):
    changes, arrays, message = FAULTS[fault]
    quantize(folder, tmp_path / "packed", scheme="int4-32")
    config, tensors = dict(open_weights(tmp_path / "packed").checkpoint.config), raw(tmp_path / "packed")
    settings = config["quantization_config"] | changes
    settings["config_groups"]["group_0"]["weights"] |= settings.pop("weights", {})
    tensors |= {f"model.layers.0.self_attn.q_proj.{name}": array for name, array in arrays.items()}
    tensors = {name: array for name, array in tensors.items() if array is not None}
    write_checkpoint(tmp_path / "bad", tensors.items(), config | {"quantization_config": settings})
    with pytest.raises(ConvertError, match=message):
        open_weights(tmp_path / "bad")


def test_nvfp4_of_modelopt(folder, tmp_path):
    """Its global scale multiplies; its codes lie under the weight's own name."""
    quantize(folder, tmp_path / "packed", scheme="nvfp4")
    tensors, values = {}, {}
    for name, array in raw(tmp_path / "packed").items():
        if name.endswith("global_scale"):
            tensors[name.replace("weight_global_scale", "weight_scale_2")] = (1 / array).reshape(())
            tensors[name.replace("weight_global_scale", "input_scale")] = np.float32(3).reshape(())
        else:
            tensors[name.replace("weight_packed", "weight")] = array
    settings = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    write_checkpoint(tmp_path / "theirs", tensors.items(), CONFIG | {"quantization_config": settings})
    weights, ours = open_weights(tmp_path / "theirs"), open_weights(tmp_path / "packed")
    for path in weights.specs:
        if weights.format(path) == "nvfp4-modelopt":
            found, same = (opened.read(path, packed=False).astype(np.float32) for opened in (weights, ours))
            np.testing.assert_allclose(found, same, rtol=2**-7, atol=0)  # a reciprocal, rounded twice to bfloat16
            values[path] = found
    assert len(values) == 7 and max(np.abs(array).max() for array in values.values()) > 1
    bad = CONFIG | {"quantization_config": settings | {"quant_algo": "FP8"}}
    write_checkpoint(tmp_path / "theirs", tensors.items(), bad)
    with pytest.raises(ConvertError, match="quant_algo: expected 'NVFP4', got 'FP8'"):
        open_weights(tmp_path / "theirs")


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("scheme", "activations"),
    [*((scheme, None) for scheme in SCHEMES), ("int4-32", "int8"), ("int8", "none"), ("fp8-row", "none")],
)
def test_transformers_decodes_the_same_values(folder, tmp_path, scheme, activations):
    torch = pytest.importorskip("torch")
    pytest.importorskip("compressed_tensors")
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    quantize(folder, tmp_path / "out", scheme=scheme, skip=[LEFT], activations=activations)
    settings = transformers.CompressedTensorsConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16, quantization_config=settings
    )
    theirs, ours = model.state_dict(), open_weights(tmp_path / "out")
    for path, tensor in ours.stream(packed=False):
        assert np.array_equal(theirs[ours.specs[path].name].float().numpy(), tensor.astype(np.float32))
    if not scheme.endswith("zeros"):  # transformers makes no room for packed zero points in a model that stays packed
        packed = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
        with torch.no_grad():
            tokens = torch.arange(1, 17)[None]
            found, right = packed(tokens).logits.float(), model(tokens).logits.float()
        after = packed.state_dict()  # decoded in the first pass
        assert all(torch.equal(after[name], tensor) for name, tensor in theirs.items())
        weights_alone = activations == "none" or activations is None and not scheme.startswith(("int8", "fp8"))
        assert torch.equal(found, right) == weights_alone  # or inputs are in eight bits too
