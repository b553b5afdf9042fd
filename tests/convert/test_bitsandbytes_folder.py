"""Whole 4-bit folders: written by transformers with bitsandbytes and read here, and the other way round."""

from dataclasses import replace

import numpy as np
import pytest

from convert.formats import nf4
from convert.quantize import quantize
from convert.saving import save
from convert.weights import open_weights, stream

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def torch():
    """torch on one thread: its threads wait for each other in a loop, which costs seconds on a busy machine."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("bitsandbytes")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield torch
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def transformers(torch):
    return pytest.importorskip("transformers")


@pytest.fixture
def plain_folder(torch, transformers, tmp_path):
    """A bfloat16 Llama; its sizes are multiples of 64, where bitsandbytes' CPU kernel decodes correctly."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def load(torch, transformers, folder, **options):
    options = {"dtype": torch.bfloat16, "device_map": "cpu"} | options
    return transformers.LlamaForCausalLM.from_pretrained(folder, **options).eval()


def logits(torch, model):
    with torch.no_grad():
        return model(torch.arange(1, 17)[None]).logits.float().numpy()


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("storage", ["uint8", "bfloat16", "float32"])
def test_a_folder_from_transformers_comes_back_byte_for_byte(
    torch, transformers, plain_folder, tmp_path, nested, storage
):
    settings = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=nested,
        bnb_4bit_quant_storage=getattr(torch, storage),
        llm_int8_skip_modules=["lm_head", "model.layers.1.mlp.down_proj"],
    )
    theirs = load(torch, transformers, plain_folder, quantization_config=settings)
    theirs.save_pretrained(tmp_path / "theirs")
    opened = open_weights(tmp_path / "theirs")
    formats = {path: opened.format(path) for path in opened.specs}
    assert formats["layers.0.mlp.down_proj.weight"] == ("nf4-nested" if nested else "nf4")
    assert formats["layers.1.mlp.down_proj.weight"] == "bfloat16"

    save(tmp_path / "back", stream(tmp_path / "theirs"), source=tmp_path / "theirs")
    assert contents(tmp_path / "back") == contents(tmp_path / "theirs")
    bare = (
        (path, replace(value, quant_state=None, storage_shape=None) if isinstance(value, nf4.NF4Tensor) else value)
        for path, value in stream(tmp_path / "theirs")
    )
    save(tmp_path / "made", bare, source=tmp_path / "theirs")
    assert contents(tmp_path / "made") == contents(tmp_path / "theirs")
    again = load(torch, transformers, tmp_path / "back")
    assert np.array_equal(logits(torch, again), logits(torch, theirs))


@pytest.mark.parametrize("nested", [False, True])
def test_a_folder_quantised_here_loads_in_bitsandbytes(torch, transformers, plain_folder, tmp_path, nested):
    bitsandbytes = pytest.importorskip("bitsandbytes.functional")

    def encoded(path, array):
        keep = array.ndim == 1 or not path.startswith("layers.") or path == "layers.1.self_attn.v_proj.weight"
        return array if keep else nf4.encode(array, nested=nested)

    packed = {path: encoded(path, array) for path, array in stream(plain_folder)}
    quantize(plain_folder, tmp_path / "quantized", nested=nested, skip=["layers.1.self_attn.v_proj"])
    model = load(torch, transformers, tmp_path / "quantized")
    for path, tensor in packed.items():
        if isinstance(tensor, nf4.NF4Tensor):
            weight = model.get_submodule("model." + path.removesuffix(".weight")).weight
            theirs = bitsandbytes.dequantize_4bit(weight.data, weight.quant_state).float().numpy()
            np.testing.assert_array_equal(theirs, nf4.decode(tensor).astype(np.float32))
    kinds = {name: type(module).__name__ for name, module in model.named_modules() if name.endswith("v_proj")}
    assert kinds == {"model.layers.0.self_attn.v_proj": "Linear4bit", "model.layers.1.self_attn.v_proj": "Linear"}

    decoded = (
        (path, nf4.decode(value) if isinstance(value, nf4.NF4Tensor) else value) for path, value in packed.items()
    )
    save(tmp_path / "decoded", decoded, source=plain_folder)
    expected = logits(torch, load(torch, transformers, tmp_path / "decoded"))
    # The same weights in bfloat16; bitsandbytes' matrix product sums and rounds (to 8 bits) in its own order.
    assert np.abs(logits(torch, model) - expected).max() < 0.02 * np.abs(expected).max()
    assert np.abs(expected - logits(torch, load(torch, transformers, plain_folder))).max() > 0.01
