"""The options of loading: declared once, and what they exclude of one another."""

import dataclasses
import inspect

import pytest

from fastjax.errors import ConfigError
from fastjax.execution.options import EXECUTION, LoadOptions
from fastjax.language_model import FastLanguageModel
from fastjax.training.config import ModelSection

DEFAULTS = {field.name: field.default for field in dataclasses.fields(LoadOptions)}


def test_the_section_is_the_options_and_the_models_name():
    section = {field.name: field.default for field in dataclasses.fields(ModelSection)}
    assert section.pop("model_name") is dataclasses.MISSING
    assert section == DEFAULTS | {"max_seq_length": 2048} and list(section) == list(DEFAULTS)
    assert set(EXECUTION) < DEFAULTS.keys()


@pytest.mark.parametrize(
    ("function", "others", "changed"),
    [
        (FastLanguageModel.from_pretrained, {"model_name", "revision", "random_state"}, {}),
        (FastLanguageModel.from_config, {"config", "random_state", "tokenizer", "mesh"}, {"load_in_4bit": False}),
    ],
)
def test_the_face_takes_the_options_as_keywords(function, others, changed):
    parameters = inspect.signature(function).parameters
    found = {name: parameter.default for name, parameter in parameters.items() if name not in others}
    left_out = {"new_tokens", "rope_scaling", "allow_nonfinite"} if changed else set()
    assert found == {name: changed.get(name, value) for name, value in DEFAULTS.items() if name not in left_out}
    assert others < parameters.keys() and list(parameters)[1:4] == ["max_seq_length", "dtype", "load_in_4bit"]
    assert all(f"            {name}: " in (function.__doc__ or "") for name in parameters)
    with pytest.raises(TypeError, match="unexpected keyword argument 'lod_in_4bit'"):
        function("m", lod_in_4bit=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"full_finetuning": True}, "load_in_4bit: expected false with full_finetuning: true, got true; a 4-bit"),
        ({"offload_layers": True, "layer_loop": "unroll"}, "offload_layers: expected false with layer_loop: unroll"),
        ({"offload_embedding": True, "full_finetuning": True}, "offload_embedding: expected false with full_finet"),
        ({"base_compute": "float8", "dtype": "float16"}, "base_compute: expected null with dtype: float16, got float8"),
        ({"new_tokens": [7]}, "new_tokens: expected a list of strings or null, got"),
    ],
)
def test_what_excludes_another_is_refused_by_its_name_here_and_in_the_section(options, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        LoadOptions(**options)
    with pytest.raises(ConfigError, match="^model." + message.replace("with ", "with model.")):
        ModelSection("m", **options)
