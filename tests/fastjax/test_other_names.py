"""Names of Unsloth's, transformers' and PEFT's on a model: served, asking for nothing, or refused with what to use."""

from pathlib import Path

import numpy as np
import pytest

import fastjax
from fastjax.errors import ConfigError
from fastjax.language_model import FastLanguageModel

ASSET = Path(fastjax.__file__).parent / "assets" / "tiny-llama"
#: The neutral values of names that public notebooks use.
LOADING = {"load_in_8bit": False, "load_in_16bit": True, "load_in_fp8": False, "token": None, "auto_model": None}
LOADING |= {"trust_remote_code": True, "fast_inference": True, "gpu_memory_utilization": 0.9, "max_lora_rank": 32}
LOADING |= {"device_map": "balanced", "attn_implementation": "eager", "unsloth_force_compile": True, "dtype": None}
LOADING |= {"unsloth_tiled_mlp": True, "fix_tokenizer": False, "torch_dtype": np.float32, "offload_embedding": False}
ADAPTER = {"loftq_config": None, "task_type": "CAUSAL_LM", "bias": "none", "use_rslora": False, "random_state": 3407}
ADAPTER |= {f"finetune_{part}": True for part in ("language_layers", "attention_modules", "mlp_modules")}
ADAPTER |= {"finetune_vision_layers": False, "use_gradient_checkpointing": "unsloth", "target_modules": "all-linear"}


@pytest.fixture(scope="module")
def base():
    return fastjax.FastModel.from_pretrained(model_name=ASSET, max_seq_length=64, **LOADING)[0]


def test_whole_models_and_tied_tables(capsys):
    """Every weight is trained in 16 bits unless told otherwise; a table that is the head's too stays in its place."""
    model, _ = FastLanguageModel.from_pretrained(ASSET, 64, full_finetuning=True)
    assert model.options.load_in_4bit is False and model.full_finetuning
    tied, _ = FastLanguageModel.from_pretrained(ASSET, 64, load_in_4bit=False, offload_embedding=True)
    assert not tied.options.offload_embedding
    assert "note: offload_embedding: the head reads the table too" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="got one loaded with full_finetuning=True; train it as it is"):
        FastLanguageModel.get_peft_model(model)


def test_folders_of_runs_name_their_result(base, tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    for load in (FastLanguageModel.from_pretrained, lambda name: FastLanguageModel.load_adapter(base, name)):
        with pytest.raises(ConfigError, match=f"got the folder of a run, whose result is {tmp_path / 'adapter'}"):
            load(tmp_path)
    with pytest.raises(ConfigError, match="expected the folder of an adapter, got a model"):
        FastLanguageModel.load_adapter(base, ASSET)


def test_names_at_the_values_that_notebooks_give(base):
    assert base.options.load_in_4bit is False and base.dtype == np.float32
    assert fastjax.FastQwen2Model.get_peft_model(base, r=4, **ADAPTER).lora.r == 4


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"load_in_8bit": True}, "load_in_8bit: expected none, got True; use load_in_4bit=True"),
        ({"device_map": "cpu"}, "device_map: expected none or 'auto' .* got 'cpu'; use .* JAX_PLATFORMS=cpu"),
        ({"auto_model": dict}, "auto_model: expected a class for causal language models, got dict"),
        ({"load_in_16bit": True, "load_in_4bit": True}, "load_in_4bit: expected False or none beside load_in_16bit"),
        ({"qat_scheme": "int4"}, "qat_scheme: expected none without full_finetuning, got 'int4'; get_peft_model"),
    ],
)
def test_values_that_ask_for_something_else_are_refused(names, message):
    with pytest.raises(ConfigError, match=f"^from_pretrained: {message}"):
        FastLanguageModel.from_pretrained(ASSET, **names)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"loftq_config": {"loftq_bits": 4}}, "loftq_config: expected none, .*; use init_lora_weights"),
        ({"finetune_vision_layers": True}, "finetune_vision_layers: expected none, got True; use a text model"),
        (
            {"finetune_mlp_modules": False},
            "finetune_mlp_modules: expected true, got False; use target_mod.*q_proj",
        ),
        ({"task_type": "SEQ_CLS"}, "task_type: expected CAUSAL_LM, got 'SEQ_CLS'; use with_score_head"),
        ({"exclude_modules": ["q_proj"]}, "exclude_modules: expected none, .*; use target_modules"),
        ({"qat_scheme": "cactus"}, "qat_scheme: expected one of int4, .*, got 'cactus'"),
    ],
)
def test_values_of_adapters_that_ask_for_something_else_are_refused(base, names, message):
    with pytest.raises(ConfigError, match=message):
        FastLanguageModel.get_peft_model(base, **names)


def test_a_scheme_of_quantisation_by_its_name(base):
    adapted = FastLanguageModel.get_peft_model(base, r=4, qat_scheme="int8-int4")
    assert adapted.quantization_aware[:2] == ("int4-32", "int8") and base.quantization_aware is None


def test_a_handles_methods(base, tmp_path):
    adapted = FastLanguageModel.get_peft_model(base, r=4)
    assert adapted.for_training() is adapted.for_inference() is adapted.eval() is adapted.train() is adapted
    adapted.save_lora(tmp_path / "lora")
    fresh = FastLanguageModel.from_pretrained(ASSET, load_in_4bit=False, max_seq_length=64)[0]
    with pytest.raises(ConfigError, match="^save_lora: expected a model with an adapter"):
        fresh.save_lora(tmp_path / "none")
    assert fresh.load_adapter(tmp_path / "lora") is fresh and fresh.lora.r == 4
    with pytest.raises(AttributeError, match=r"model.fast_generate is not served; use model.generate\("):
        fresh.fast_generate("a")


def test_a_cell_that_runs_again_keeps_its_adapter(base, capsys):
    """The adapter of equal settings stays; other settings, and a base that training has changed, are refused."""
    adapted = FastLanguageModel.get_peft_model(FastLanguageModel.from_pretrained(ASSET, 64, load_in_4bit=False)[0], r=2)
    again = FastLanguageModel.get_peft_model(adapted, r=2)
    assert again.trainable is adapted.trainable and "has such an adapter already" in capsys.readouterr().err
    for model, rank in ((adapted, 4), (adapted.value, 2)):
        with pytest.raises(ConfigError, match="model: expected one without an adapter"):
            FastLanguageModel.get_peft_model(model, r=rank)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tools": []}, r"tools: unknown; use generate\(\*\*ids\) with ids = tokenizer.apply_chat"),
        ({"chat_template_kwargs": "x"}, 'chat_template_kwargs: expected a mapping, .*, got "x"'),
    ],
)
def test_names_of_generation_with_a_way_out(base, given, message):
    with pytest.raises(ConfigError, match=message):
        base.generate(["a"], max_new_tokens=1, **given)
