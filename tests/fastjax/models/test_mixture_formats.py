"""Mixtures whose experts are held in 4 bits compute what they decode to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convert.errors import ConvertError
from convert.formats import mxfp4
from convert.quantize import quantize
from fastjax.execution.stacks import layer_of
from fastjax.language_model import FastLanguageModel
from fastjax.quantization import MXFP4Weight, NF4Weight, NVFP4Weight, Weight, as_weight
from tests.convert.test_experts import in_mxfp4
from tests.support import tiny
from tests.support.family_mixtures import MIXTURES
from tests.support.family_sizes import FULL, SLIDING

#: A layer without a mixture and one with.
TWO_LAYERS = MIXTURES["qwen2_moe"] | {"num_hidden_layers": 2, "layer_types": [FULL, SLIDING], "mlp_only_layers": []}


def experts(model):
    """gate_up of the last layer, which is a mixture."""
    runs = [
        [model.frozen["layers"][number][place] for place in range(stack.period)]
        for number, stack in enumerate(model.plan)
    ]
    layer = layer_of(runs, model.plan, model.config.num_hidden_layers - 1)
    return layer["mlp"]["experts"]["gate_up"]["weight"]


@pytest.mark.exhaustive("64")
@pytest.mark.parametrize("width", [32, 64])  # blocks that cross rows, and rows of whole blocks
def test_nf4(width, tmp_path):
    """A folder in NF4 as it is and decoded, and a plain folder quantised as it is loaded."""
    config = TWO_LAYERS | {"hidden_size": width, "moe_intermediate_size": 2 * width}
    tiny.write_folder(tmp_path / "plain", config, tiny.arrays(config))
    quantize(tmp_path / "plain", tmp_path / "packed")
    documents = tiny.documents(config, (40, 9))
    tokens, _, segments, positions = tiny.rows([documents], 50)
    folders = {"packed": True, "decoded": False, "plain": True}
    models = {
        name: tiny.model(tmp_path / ("plain" if name == "plain" else "packed"), None, load_in_4bit=bits)
        for name, bits in folders.items()
    }
    assert as_weight(experts(models["packed"])).formats == as_weight(experts(models["plain"])).formats == ("NF4",)
    assert isinstance(experts(models["packed"]), NF4Weight) == (width == 64)
    assert experts(models["decoded"]).shape == (4, 4 * width, width)
    found = {name: tiny.logits(model, tokens, positions, segments) for name, model in models.items()}
    # float32 sums in another order; the scales' offsets may differ in their last bit between the two encoders
    np.testing.assert_allclose(found["packed"], found["decoded"], rtol=0, atol=1e-4)
    np.testing.assert_allclose(found["plain"], found["decoded"], rtol=0, atol=1e-4)


@pytest.mark.exhaustive(
    by="tests/fastjax/models/test_quantized.py::test_every_format_that_a_merge_writes_is_what_was_trained"
)
def test_nvfp4(tmp_path):
    """Experts packed one by one; an expert's gate and up share their global scale."""
    config = TWO_LAYERS | {"hidden_size": 64, "moe_intermediate_size": 128}
    config |= {"intermediate_size": 48, "shared_expert_intermediate_size": 32}
    tiny.write_folder(tmp_path / "plain", config, tiny.arrays(config))
    quantize(tmp_path / "plain", tmp_path / "packed", scheme="nvfp4", skip=["o_proj"])
    packed, decoded = (tiny.model(tmp_path / "packed", None, load_in_4bit=bits) for bits in (True, False))
    weight = experts(packed)
    assert isinstance(weight, NVFP4Weight)
    scales = np.asarray(weight.global_scales)
    assert (scales == scales[:, :1]).all() and len(np.unique(scales)) == len(scales)
    np.testing.assert_array_equal(weight.experts(jnp.float32), experts(decoded))
    tokens = tiny.documents(config, (40,))[0][None]
    # float32 sums in another order
    np.testing.assert_allclose(tiny.logits(packed, tokens), tiny.logits(decoded, tokens), rtol=0, atol=1e-4)


def test_mxfp4(tmp_path):
    config = MIXTURES["gpt_oss"] | {"hidden_size": 64, "quantization_config": {"quant_method": "mxfp4"}}
    packed, plain = in_mxfp4(tiny.arrays(config))
    tiny.write_folder(tmp_path / "packed", config | {"dtype": "bfloat16"}, packed)
    whole = {name: array.astype(np.float32) for name, array in plain.items()}
    tiny.write_folder(tmp_path / "plain", {**config, "quantization_config": None}, whole)
    models = [
        tiny.model(tmp_path / name, None, load_in_4bit=bits)
        for name, bits in (("packed", True), ("packed", False), ("plain", False))
    ]
    assert isinstance(experts(models[0]), MXFP4Weight) and experts(models[1]).dtype == jnp.float32
    tokens = tiny.documents(config, (40,))[0][None]
    kept, decoded, expected = (tiny.logits(model, tokens) for model in models)
    np.testing.assert_allclose(kept, expected, rtol=0, atol=1e-4)  # float32 sums in another order
    np.testing.assert_array_equal(decoded, expected)


def test_random_mxfp4():
    """A config of such a folder: experts as codes of the config's deviation, every other matrix an array."""
    config = MIXTURES["gpt_oss"] | {"hidden_size": 64, "quantization_config": {"quant_method": "mxfp4"}}
    model = FastLanguageModel.from_config(config, load_in_4bit=True)
    weight = experts(model)
    assert isinstance(weight, MXFP4Weight)
    packed = [leaf for leaf in jax.tree.leaves(model.frozen, is_leaf=lambda x: isinstance(x, Weight))]
    assert {type(leaf) for leaf in packed if isinstance(leaf, Weight)} == {MXFP4Weight}
    large = MXFP4Weight.random(jax.random.key(1), (4, 64, 1024), "float32", 0.05)
    values = np.asarray(large.experts(jnp.float32))
    # 262,144 values of a kurtosis of 2: the deviation of their deviation is 0.1%
    assert values.std() == pytest.approx(0.05, rel=0.01) and abs(values.mean()) < 1e-3
    assert np.unique(np.asarray(large.scales)).size == 2
    with pytest.raises(ConvertError, match="whole blocks of 32, got 48"):
        MXFP4Weight.random(jax.random.key(1), (4, 64, 48), "float32", 0.05)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_mxfp4_values_are_those_of_the_file_format(dtype):
    rng = np.random.default_rng(0)
    codes, scales = rng.integers(0, 256, (3, 8, 2, 16)), rng.integers(110, 136, (3, 8, 2))
    tensor = mxfp4.MXFP4Tensor(codes.astype(np.uint8), scales.astype(np.uint8), dtype)
    weight = MXFP4Weight.from_tensor(tensor)
    decoded = jax.jit(lambda weight: weight.experts(jnp.float32))(weight)
    expected = mxfp4.MXFP4.decode(tensor).astype(np.float32)
    assert np.asarray(decoded).tobytes() == expected.tobytes()
    top = MXFP4Weight.from_tensor(mxfp4.MXFP4Tensor(*(array[:, :4] for array in tensor[:2]), dtype))
    below = MXFP4Weight.from_tensor(mxfp4.MXFP4Tensor(*(array[:, 4:] for array in tensor[:2]), dtype))
    joined = top.concatenate([below])
    assert jnp.array_equal(joined.codes, weight.codes) and jnp.array_equal(joined.scales, weight.scales)
    assert jnp.array_equal(weight.rows(slice(4, 8)).codes, below.codes)


def test_the_least_scale_is_a_subnormal_number():
    tensor = mxfp4.MXFP4Tensor(np.full((1, 1, 1, 16), 0x77, np.uint8), np.zeros((1, 1, 1), np.uint8), "float32")
    assert mxfp4.MXFP4.decode(tensor).max() == np.float32(6 * 2.0**-127)
    # processors may flush it to zero
    assert float(MXFP4Weight.from_tensor(tensor).experts(jnp.float32).max()) in (0.0, 6 * 2.0**-127)


def test_scales_beyond_float32_are_refused(tmp_path):
    config = MIXTURES["gpt_oss"] | {"hidden_size": 64, "quantization_config": {"quant_method": "mxfp4"}}
    packed, _ = in_mxfp4(tiny.arrays(config))
    name = "model.layers.2.mlp.experts.down_proj_scales"
    packed[name][1, 2, 0] = 255
    tiny.write_folder(tmp_path, config, packed)
    with pytest.raises(ConvertError, match=r"layers.2.mlp.experts.down_proj.weight: .*expected finite values"):
        tiny.model(tmp_path, None, load_in_4bit=True)
