"""Quantisation-aware training: the trained model is the quantised folder's; what is not served is refused."""

import json
import re

import jax
import ml_dtypes
import numpy as np
import pytest

from convert.checkpoint import open_checkpoint
from convert.errors import ConvertError
from convert.formats import WRITERS
from convert.gguf import export_gguf
from convert.quantize import quantize
from fastjax.errors import ConfigError
from fastjax.language_model import FastLanguageModel
from fastjax.language_model.variants import with_fake_quantization
from fastjax.quantization.fake import WEIGHTS, fake_quantize
from fastjax.training.step import init_state
from tests.fastjax.quantization.test_fake import integers
from tests.support import tiny
from tests.support.gguf_models import SIZES, write_model
from tests.support.steps import RECORDER, gradients, recording_step

WIDE = {"hidden_size": 64, "intermediate_size": 128, "tie_word_embeddings": True}
#: float32, logits of a few units, sums of a hundred products in another order.
TOLERANCE = 1e-4


def quantized_folder(source, folder, config, dtype):
    """A folder with the values that its layers' matrices have in int4, groups of 32, with scales in a dtype."""
    checkpoint = open_checkpoint(source)
    arrays = {name: checkpoint.read(name) for name in checkpoint.tensors}
    for name, array in arrays.items():
        if name.endswith("proj.weight"):
            arrays[name] = integers(array.astype(np.float32), 32, -8, 7, dtype).astype(dtype)
    return tiny.write_folder(folder, config, arrays)


@pytest.mark.exhaustive(
    by="test_every_format_that_a_merge_writes_is_what_was_trained, test_an_adapter_over_nf4_goes_back_to_nf4"
)
@pytest.mark.parametrize(("scheme", "dtype"), [("nf4", "bfloat16"), ("nf4", "float32"), ("int4-32", "bfloat16")])
def test_the_merged_and_quantised_folder_is_the_trained_model(tmp_path, scheme, dtype):
    config, own = tiny.config(**WIDE, dtype=dtype), ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    arrays = {name: array.astype(own) for name, array in tiny.arrays(config).items()}
    folder = tiny.write_folder(tmp_path / "base", config, arrays)
    ours = tiny.adapted(tiny.model(folder, config), target_modules=["q_proj", "v_proj", "down_proj"])
    aware = with_fake_quantization(ours, scheme)
    merged = ours.save_pretrained_merged(tmp_path / "merged", dtype="nf4" if scheme == "nf4" else None)
    if scheme == "int4-32":
        merged = quantized_folder(merged, tmp_path / "quantized", config, own)
    tokens = np.stack(tiny.documents(config, (40, 40)))
    expected = tiny.logits(tiny.model(merged, config, load_in_4bit=scheme == "nf4"), tokens)
    np.testing.assert_allclose(tiny.logits(aware, tokens), expected, rtol=0, atol=TOLERANCE)
    assert np.abs(tiny.logits(ours, tokens) - expected).max() > 1000 * TOLERANCE, "quantisation does nothing"


#: One layer, so that the logits follow from products that are equal to the bit.
ONE_LAYER = tiny.config(
    **WIDE | {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}, dtype="bfloat16", num_hidden_layers=1
)


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory):
    """A model with an adapter, tokens, and its logits of them."""
    arrays = {name: array.astype(ml_dtypes.bfloat16) for name, array in tiny.arrays(ONE_LAYER).items()}
    folder = tiny.write_folder(tmp_path_factory.mktemp("base") / "model", ONE_LAYER, arrays)
    ours = tiny.adapted(tiny.model(folder, ONE_LAYER), target_modules=["q_proj", "v_proj", "down_proj"])
    tokens = np.stack(tiny.documents(ONE_LAYER, (40, 40)))
    return ours, tokens, tiny.logits(ours, tokens)


# Scales that a projection's parts share or have apart: by blocks of both sides, and a matrix's own beside its groups'.
@pytest.mark.exhaustive("nvfp4")
@pytest.mark.parametrize("scheme", sorted(set(WRITERS) - {"nf4", "int4-128-zeros"}))  # one above; as those of 32
def test_every_format_that_a_merge_writes_is_what_was_trained(one_layer, tmp_path, scheme):
    ours, tokens, plain = one_layer
    merged = tiny.model(ours.save_pretrained_merged(tmp_path / scheme, dtype=scheme), ONE_LAYER)
    aware, expected = with_fake_quantization(ours, scheme), tiny.logits(merged, tokens)
    np.testing.assert_allclose(tiny.logits(aware, tokens), expected, rtol=0, atol=1e-5)
    assert np.abs(plain - expected).max() > 0.1


@pytest.mark.exhaustive(
    by="tests/fastjax/quantization/test_fake.py::test_ggml_rounds_the_folders_values_so, "
    "test_every_format_that_a_merge_writes_is_what_was_trained"
)
@pytest.mark.parametrize("type", ["q4_0", "q8_0"])
def test_a_gguf_file_has_the_values_that_were_trained(tmp_path, type):
    """Of a merged folder in bfloat16, matrix by matrix, and in logits, whatever float32 sums differ by."""
    gguf = pytest.importorskip("gguf")
    write_model(tmp_path / "base", {"model_type": "llama", "dtype": "bfloat16", **SIZES})
    (tmp_path / "base" / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    base, _ = FastLanguageModel.from_pretrained(tmp_path / "base", dtype="float32", load_in_4bit=False)
    ours = tiny.adapted(base, target_modules=["q_proj", "down_proj"])
    aware = with_fake_quantization(ours, type, None, ["o_proj"])
    merged = aware.save_pretrained_merged(tmp_path / "merged")
    assert export_gguf(merged, tmp_path / "m.gguf", type=type, skip=["o_proj"]).notes == ()
    (note,) = export_gguf(merged, tmp_path / "other.gguf", type="q5_0").notes
    assert note == f"merged was trained for {type} (quantization_aware.json), not for q5_0"
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert found["blk.0.attn_output.weight"].tensor_type.name == "BF16"
    config, checkpoint = json.loads((merged / "config.json").read_text()), open_checkpoint(merged)
    arrays = {name: checkpoint.read(name).astype(np.float32) for name in checkpoint.tensors}
    parts = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "gate_proj": "ffn_gate", "up_proj": "ffn_up"}
    for name, array in arrays.items():
        part = name.split(".")[-2]
        if part in (*parts, "down_proj"):
            tensor = found[f"blk.{name.split('.')[2]}.{parts.get(part, 'ffn_down')}.weight"]
            assert tensor.tensor_type.name == type.upper()
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            if part in ("q_proj", "k_proj"):  # llama.cpp pairs neighbours
                pairs = values.reshape(-1, SIZES["head_dim"] // 2, 2, values.shape[1])
                values = pairs.swapaxes(1, 2).reshape(values.shape)
            right = fake_quantize(array, WEIGHTS[type])
            np.testing.assert_array_equal(values, right)
            arrays[name] = values
    decoded = tiny.model(tiny.write_folder(tmp_path / "decoded", config | {"dtype": "float32"}, arrays), config)
    tokens = np.stack(tiny.documents(config, (40, 40)))
    expected = tiny.logits(decoded, tokens)
    np.testing.assert_allclose(tiny.logits(aware, tokens), expected, rtol=0, atol=TOLERANCE)
    assert np.abs(tiny.logits(ours, tokens) - expected).max() > 10 * TOLERANCE


@pytest.mark.parametrize("packed", [False, True])
def test_an_adapter_over_nf4_goes_back_to_nf4(tmp_path, packed):
    """Modules without an adapter keep their codes, or are quantised again, as the merge has it."""
    config, folder = tiny.config(**WIDE), tiny.shared_folder(**WIDE)
    if packed:
        quantize(folder, tmp_path / "packed")
        folder = tmp_path / "packed"
    ours = tiny.adapted(tiny.model(folder, config, load_in_4bit=True), target_modules=["q_proj", "up_proj"])
    aware = with_fake_quantization(ours, "nf4")
    folder = ours.save_pretrained_merged(tmp_path / "merged", dtype="nf4", base_in_nf4=not packed)
    tokens = np.stack(tiny.documents(config, (40, 40)))
    expected = tiny.logits(tiny.model(folder, config, load_in_4bit=True), tokens)
    np.testing.assert_allclose(tiny.logits(aware, tokens), expected, rtol=0, atol=TOLERANCE)
    with pytest.raises(ConfigError, match=r"load_in_4bit: false.* with int4-32, got NF4 weights"):
        with_fake_quantization(ours, "int4-32")


def test_modules_that_are_left_out_of_the_training_are_left_out_of_the_merge(tmp_path):
    config = tiny.config(**WIDE, dtype="float32")
    folder = tiny.write_folder(tmp_path / "base", config, tiny.arrays(config))
    ours = tiny.adapted(tiny.model(folder, config), target_modules=["q_proj", "down_proj"])
    aware = with_fake_quantization(ours, "int4-32", None, ["down_proj"])
    tokens = np.stack(tiny.documents(config, (40, 40)))
    expected, found = tiny.logits(aware, tokens), {}
    for name, skip in (("skipped", ["down_proj"]), ("whole", [])):
        merged = tiny.model(ours.save_pretrained_merged(tmp_path / name, dtype="int4-32", skip=skip), config)
        found[name] = np.abs(tiny.logits(merged, tokens) - expected).max()
    assert found["skipped"] < TOLERANCE < found["whole"] / 100
    with pytest.raises(ConvertError, match="skip: expected no module"):
        ours.save_pretrained_merged(tmp_path / "plain", skip=["down_proj"])


def test_weights_trained_whole_are_those_quantised_after_the_save(tmp_path):
    config = tiny.config(**WIDE, dtype="bfloat16")
    model = with_fake_quantization(tiny.model(tmp_path / "base", config, full_finetuning=True), "int4-32")
    saved = model.save_pretrained(tmp_path / "saved")
    quantized = tiny.model(quantized_folder(saved, tmp_path / "quantized", config, ml_dtypes.bfloat16), config)
    # what is not quantised was rounded to bfloat16 by the save
    plain = with_fake_quantization(tiny.model(saved, config, full_finetuning=True), "int4-32")
    tokens = np.stack(tiny.documents(config, (40, 40)))
    np.testing.assert_allclose(tiny.logits(plain, tokens), tiny.logits(quantized, tokens), rtol=0, atol=TOLERANCE)
    assert np.abs(tiny.logits(plain, tokens) - tiny.logits(tiny.model(saved, config), tokens)).max() > 0.1


def test_a_step_is_plain_before_the_start_and_quantised_from_it_on_in_one_program():
    config = tiny.config(**WIDE)
    plain = tiny.adapted(tiny.model(tiny.shared_folder(**WIDE), config), target_modules=["q_proj", "down_proj"])
    aware = with_fake_quantization(plain, "int4-32", None, ["self_attn", "gate_proj", "up_proj"])
    [batch] = tiny.batches(config, 1)
    expected, quantized = gradients(plain, batch), gradients(aware, batch)
    step = recording_step(aware.graphdef, aware.trainable_filter, quantize_from=2)
    state, found = init_state(aware.trainable, RECORDER, jax.random.key(0)), []
    for _ in range(3):
        state, metrics = step(state, aware.frozen, batch)
        found.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    assert step._cache_size() == 1
    for number, (wanted, _) in enumerate([expected, expected, quantized]):
        np.testing.assert_allclose(found[number], (wanted["loss"], wanted["grad_norm"]), rtol=1e-5)
    assert abs(expected[0]["loss"] - quantized[0]["loss"]) > 1e-3


def test_a_format_of_inputs_that_do_not_fit_is_named():
    changed = WIDE | {"intermediate_size": 72}
    model = tiny.model(tiny.shared_folder(**changed), tiny.config(**changed))
    message = "qat.activations: expected a format for layers.0.mlp.(down_proj), got nvfp4: rows of 72 columns are not"
    with pytest.raises(ConfigError, match=re.escape(message)):
        with_fake_quantization(model, "int8", "nvfp4")


@pytest.mark.parametrize(
    ("lora", "arguments", "message"),
    [
        ({"use_dora": True}, {}, "expected use_dora: false"),
        ({"lora_dropout": 0.1}, {}, "expected lora_dropout: 0"),
        (
            None,
            {"weights": "int4-128"},
            "layers.0.self_attn.(q_proj, k_proj, v_proj), got int4-128: rows of 64 columns",
        ),
        (None, {"weights": "int3"}, "qat.weights: expected one of int4-32, int4-128"),
        (None, {"activations": "int4"}, "qat.activations: expected one of int8, fp8, fp8-128, nvfp4, got 'int4'"),
        (None, {"modules_to_not_quantize": ["k_proj"]}, "self_attn.(q_proj, k_proj, v_proj) together"),
        (None, {"modules_to_not_quantize": ["layers.0.mlp"]}, "; layers may differ where they are unrolled"),
        (None, {"modules_to_not_quantize": ["layers"]}, "expected a projection that is quantised, got none"),
        (None, {"modules_to_not_quantize": ["k"]}, "qat.modules_to_not_quantize: no module has the name 'k'"),
    ],
)
def test_what_is_not_served_is_refused_by_name(lora, arguments, message):
    model = tiny.model(tiny.shared_folder(**WIDE), tiny.config(**WIDE))
    if lora is not None:
        model = FastLanguageModel.get_peft_model(model, r=4, target_modules=["q_proj"], **lora)
    with pytest.raises(ConfigError, match=re.escape(message)):
        with_fake_quantization(model, **{"weights": "int4-32", **arguments})


def test_other_dtypes_modules_in_float32_and_chunks_are_refused():
    for own, options, message in (
        ("float32", {"dtype": "bfloat16"}, "dtype: expected float32, the folder's"),
        (
            "bfloat16",
            {"dtype": "bfloat16", "float32_modules": ["o_proj"]},
            "float32_modules: expected none of layers.0",
        ),
        ("float32", {"mlp_chunk": 8}, "mlp_chunk: expected auto or null with qat, got 8"),
        ("bfloat16", {"dtype": "bfloat16", "base_compute": "float8"}, "base_compute: expected none with qat"),
    ):
        changed = {**WIDE, "dtype": own}
        model = tiny.model(tiny.shared_folder(**changed), tiny.config(**changed), **options)
        with pytest.raises(ConfigError, match=re.escape(message)):
            with_fake_quantization(model, "int4-32")
