"""NaN and infinity in what is loaded are refused by the tensor's name, before anything is computed with them."""

import jax
import ml_dtypes
import numpy as np
import pytest

from convert.adapters import AdapterConfig, write_adapter
from convert.errors import ConvertError
from convert.formats import nf4
from fastjax.language_model import FastLanguageModel
from tests.support import tiny
from tests.support.folders import write_checkpoint

CONFIG = tiny.config(hidden_size=64, intermediate_size=128, num_hidden_layers=2)
MATRIX, NORM = "model.layers.1.mlp.down_proj.weight", "model.norm.weight"


def spoil(folder, name, value, dtype=np.float32, tensors=None):
    """A folder of which one element is no finite number; the last of a block that is not the first."""
    tensors = dict(tensors or {key: array.astype(dtype) for key, array in tiny.arrays(CONFIG).items()})
    tensors[name] = tensors[name].copy()
    tensors[name].reshape(-1)[-1] = value
    write_checkpoint(folder, tensors.items(), CONFIG)
    tiny.write_tokenizer(folder, CONFIG)
    return folder


@pytest.mark.parametrize("load_in_4bit", [True, False], ids=["quantised", "as it is"])
@pytest.mark.parametrize("name", [MATRIX, NORM])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_value_that_is_not_finite_is_refused_by_the_tensors_name(tmp_path, name, value, load_in_4bit):
    folder = spoil(tmp_path / "model", name, value, ml_dtypes.bfloat16)
    with pytest.raises(ConvertError, match=f"model.safetensors: {name}: expected finite values, got NaN or infinity"):
        tiny.model(folder, CONFIG, load_in_4bit=load_in_4bit)


def test_they_can_be_let_through_but_not_into_nf4(tmp_path):
    folder = spoil(tmp_path / "model", NORM, np.nan)
    model = tiny.model(folder, CONFIG, load_in_4bit=True, allow_nonfinite=True)
    assert np.isnan(model.frozen["norm"]["weight"][-1])
    folder = spoil(tmp_path / "other", MATRIX, np.inf)
    with pytest.raises(ConvertError, match=f"{MATRIX}: .*NF4 cannot hold them.*float32_modules"):
        tiny.model(folder, CONFIG, load_in_4bit=True, allow_nonfinite=True)
    tiny.model(folder, CONFIG, allow_nonfinite=True)


def test_what_overflows_the_dtype_of_the_computation_is_refused(tmp_path):
    folder = spoil(tmp_path / "model", NORM, 1e6)
    tiny.model(folder, CONFIG)
    with pytest.raises(ConvertError, match=f"{NORM}: .*or where float16 cannot hold them"):
        tiny.model(folder, CONFIG, dtype="float16")


@pytest.mark.parametrize("load_in_4bit", [True, False], ids=["packed", "decoded"])
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain scales"])
def test_scales_of_a_4bit_folder(tmp_path, nested, load_in_4bit):
    tensors = tiny.arrays(CONFIG)
    tensors |= nf4.to_tensors(MATRIX, nf4.encode(tensors[MATRIX], nested=nested))
    name = MATRIX + (".nested_absmax" if nested else ".absmax")
    folder = spoil(tmp_path / "model", name, np.nan, tensors=tensors)
    with pytest.raises(ConvertError, match=f"{MATRIX}: expected finite values"):
        tiny.model(folder, CONFIG, load_in_4bit=load_in_4bit)


@pytest.mark.parametrize("options", [{}, {"load_in_4bit": True}, {"full_finetuning": True}])
def test_codes_of_an_fp8_folder(tmp_path, options):
    tensors = tiny.arrays(CONFIG)
    tensors[MATRIX] = tensors[MATRIX].astype(ml_dtypes.float8_e4m3fn)
    tensors[f"{MATRIX}_scale"] = np.ones((1,), np.float32)
    folder, config = tmp_path / "model", CONFIG | {"quantization_config": {"quant_method": "fbgemm_fp8"}}
    write_checkpoint(folder, tensors.items(), config)
    tiny.write_tokenizer(folder, CONFIG)
    tiny.model(folder, CONFIG, **options)
    tensors[MATRIX].reshape(-1)[-1] = np.nan
    write_checkpoint(folder, tensors.items(), config)
    with pytest.raises(ConvertError, match=f"{MATRIX}: expected finite values"):
        tiny.model(folder, CONFIG, **options)


def test_an_adapter(tmp_path):
    base = tiny.model(tmp_path / "model", CONFIG)
    arrays = {
        "layers.0.self_attn.q_proj.lora_A": np.ones((2, 64), np.float32),
        "layers.0.self_attn.q_proj.lora_B": np.full((64, 2), np.inf, np.float32),
    }
    settings = AdapterConfig(r=2, target_modules=["q_proj"], layers_to_transform=[0])
    write_adapter(tmp_path / "adapter", settings, arrays)
    message = r"adapter_model.safetensors: layers.0.self_attn.q_proj.lora_B: expected finite values"
    with pytest.raises(ConvertError, match=message):
        FastLanguageModel.load_adapter(base, tmp_path / "adapter")
    model = FastLanguageModel.load_adapter(base, tmp_path / "adapter", allow_nonfinite=True)
    assert any(np.isinf(leaf).any() for leaf in jax.tree.leaves(model.trainable))
