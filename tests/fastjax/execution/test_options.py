"""The options of loading: declared once; what each refuses, and what they exclude of one another."""

import dataclasses
import inspect
from typing import Literal

import jax.numpy as jnp
import pytest

from convert.families.mapping import read_config
from fastjax.errors import ConfigError
from fastjax.execution.execution import Execution
from fastjax.execution.opening import row_length
from fastjax.execution.options import EXECUTION, LoadOptions
from fastjax.language_model import FastLanguageModel
from fastjax.training.config import ModelSection
from tests.support import tiny
from tests.support.family_mixtures import MIXTURES

DEFAULTS = {field.name: field.default for field in dataclasses.fields(LoadOptions)}


def test_the_section_is_the_options_and_the_models_name():
    section = {field.name: field.default for field in dataclasses.fields(ModelSection)}
    assert section.pop("model_name") is dataclasses.MISSING
    assert section == DEFAULTS | {"max_seq_length": 2048} and list(section) == list(DEFAULTS)
    assert set(EXECUTION) < DEFAULTS.keys()


@pytest.mark.parametrize(
    ("function", "others", "changed"),
    [
        (FastLanguageModel.from_pretrained, {"model_name", "revision", "random_state", "qat_scheme"}, {}),
        (FastLanguageModel.from_config, {"config", "random_state", "tokenizer", "mesh"}, {"load_in_4bit": False}),
    ],
)
def test_the_face_takes_the_options_as_keywords(function, others, changed):
    parameters = inspect.signature(function).parameters
    found = {name: parameter.default for name, parameter in parameters.items() if name not in others}
    left_out = {"new_tokens", "special_tokens_map", "rope_scaling", "allow_nonfinite"} if changed else set()
    assert found == {name: changed.get(name, value) for name, value in DEFAULTS.items() if name not in left_out}
    assert others < parameters.keys() and list(parameters)[1:4] == ["max_seq_length", "dtype", "load_in_4bit"]
    assert parameters["layer_loop"].annotation == Literal["scan", "unroll"] and "Annotated" not in str(parameters)
    assert all(f"            {name}: " in (function.__doc__ or "") for name in parameters)
    with pytest.raises(TypeError, match=f"{function.__name__}: got an unexpected keyword argument 'lod_in_4bit'"):
        function("m", lod_in_4bit=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"full_finetuning": True}, "load_in_4bit: expected false with full_finetuning: true, got true; a 4-bit"),
        ({"offload_layers": True, "layer_loop": "unroll"}, "offload_layers: expected false with layer_loop: unroll"),
        ({"offload_embedding": True, "full_finetuning": True}, "offload_embedding: expected false with full_finet"),
        ({"base_compute": "float8", "dtype": "float16"}, "base_compute: expected null with dtype: float16, got float8"),
        (
            {"base_compute": "float8", "full_finetuning": True, "load_in_4bit": False},
            "base_compute: expected null with",
        ),
        ({"base_compute": "float4"}, "base_compute: expected one of float8, float8_backward or null, got 'float4'"),
        ({"new_tokens": [7]}, "new_tokens: expected a list of strings or null, got"),
        ({"float32_modules": "norm"}, "float32_modules: expected a list of strings or null, got 'norm'"),
        ({"layer_loop": "loop"}, "layer_loop: expected one of scan, unroll, got 'loop'"),
        ({"dtype": "int8"}, "dtype: expected one of bfloat16, float16, float32 or null, got 'int8'"),
        ({"param_dtype": "int8"}, "param_dtype: expected one of bfloat16, float16, float32, got 'int8'"),
        ({"use_gradient_checkpointing": "some"}, "use_gradient_checkpointing: expected .* got 'some'"),
        *(
            ({"mlp_chunk": chunk}, "mlp_chunk: expected an integer of at least 1 or auto or null, got")
            for chunk in (0, -1, True, "some", 1.5)
        ),
    ],
)
def test_what_is_refused_is_named_here_and_in_the_section(options, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        LoadOptions(**options)
    with pytest.raises(ConfigError, match="^model." + message.replace("with ", "with model.")):
        ModelSection("m", **options)


def test_an_execution_is_told_in_words():
    config = read_config(tiny.CONFIG, where="tiny")
    options = LoadOptions(layer_loop="unroll", use_gradient_checkpointing=False, mlp_chunk=64)
    assert str(Execution.of(options, config)) == "layers unrolled, rematerialisation projections, MLPs by 64 tokens"
    said = "layers scanned, rematerialisation full, MLPs by chunks in long rows"
    assert str(Execution.of(LoadOptions(), config)) == said


@pytest.mark.parametrize(("given", "kept"), [(True, "full"), (False, "projections"), ("auto", "auto"), ("full:2",) * 2])
def test_a_model_keeps_its_options_as_they_came_out(given, kept):
    """So a trainer's settings are those that it wrote before, and a resumed run finds no difference."""
    options = {"use_gradient_checkpointing": given, "float32_modules": ["norm"], "load_in_4bit": True}
    model = FastLanguageModel.from_config(tiny.CONFIG, **options, param_dtype=jnp.bfloat16)
    settled = dataclasses.asdict(LoadOptions(**options)) | {"max_seq_length": 2048, "dtype": "float32"}
    settled |= {"use_gradient_checkpointing": kept, "param_dtype": "bfloat16"}
    assert dataclasses.asdict(model.options) == settled | {"max_seq_length": model.max_seq_length}
    adapted = FastLanguageModel.get_peft_model(model, use_gradient_checkpointing=given)
    assert adapted.options == model.options and adapted.execution == model.execution


def test_rows_in_which_attention_would_be_sparse_are_refused():
    config = read_config(MIXTURES["deepseek_v32"])
    assert row_length(LoadOptions(), config) == row_length(LoadOptions(max_seq_length=64), config) == 64
    with pytest.raises(ConfigError, match="max_seq_length: expected at most the model's index_topk, 64, got 65"):
        row_length(LoadOptions(max_seq_length=65), config)
