"""Hostile files cost little time and memory: they are refused before anything of the size they name is made."""

import json
import re
import time

import numpy as np
import pytest

from convert.adapter_config import AdapterConfig, config_from_json, rank_and_alpha, targets
from convert.checkpoint import INDEX, open_checkpoint, write_config
from convert.errors import ConvertError
from convert.families.mapping import read_config
from convert.formats import nf4
from convert.inspect import inspect
from convert.limits import DIMENSIONS
from convert.patterns import fullmatch, match, mistake
from convert.tensor_file import read_header
from convert.weights import open_weights
from tests.support import tiny
from tests.support.folders import write_checkpoint

SLOW = r"(.|..|...)+(?<!.)"
MODULE = "model.layers.11.self_attn.q_proj"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Two seconds of processor time, for what takes milliseconds; a tenth of the usual for an expression."""
    monkeypatch.setattr("convert.patterns.MATCH_SECONDS", 0.1)
    begin = time.process_time()
    yield
    assert time.process_time() - begin < 2


@pytest.mark.parametrize("count", [4, 10**6, 2**62, 10**200], ids=["one too many", "a million", "2⁶²", "10²⁰⁰"])
def test_layers_are_bounded_by_the_stored_tensors(make_folder, llama_config, count):
    folder, _ = make_folder()
    config = llama_config | {"num_hidden_layers": count}
    write_config(folder / "config.json", config)
    with pytest.raises(ConvertError) as error:
        open_weights(folder)
    if count == 4:
        assert "tensors that it needs and that are missing: model.layers.3.input_layernorm" in str(error.value)
        return
    assert re.search(r"config.json: num_hidden_layers: expected at most \d+, .* tensors .* got 1?\d", str(error.value))
    assert len(str(error.value)) < 1000
    with pytest.raises(ConvertError, match="num_hidden_layers: expected at most"):
        inspect(folder)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "smollm3", "qwen2", "mistral"])
@pytest.mark.parametrize("count", [10**6, 2**62])
def test_layers_of_a_config_without_tensors(model_type, count):
    config = tiny.config(model_type=model_type, num_hidden_layers=count, num_attention_heads=4, num_key_value_heads=4)
    with pytest.raises(
        ConvertError, match="num_hidden_layers: expected (at most 100000|a positive integer below 2³¹), got"
    ):
        read_config(config)


def test_layers_of_the_text_half(tmp_path):
    config = {"model_type": "gemma3", "text_config": {"num_hidden_layers": 2**62}}
    write_checkpoint(tmp_path / "model", [("a", np.zeros(3, np.float32))], config)
    with pytest.raises(ConvertError, match="config.json: text_config.num_hidden_layers: expected at most 1, "):
        open_checkpoint(tmp_path / "model")


def test_a_message_lists_some_names_and_counts_the_rest(make_folder, llama_config):
    folder, _ = make_folder()
    write_config(folder / "config.json", llama_config | {"num_hidden_layers": 30})
    with pytest.raises(ConvertError, match=r"model.layers.3.input_layernorm.weight, .* and \d+ more") as error:
        open_weights(folder)
    assert len(str(error.value)) < 5000


@pytest.mark.parametrize("size", [1, 2**62])
def test_a_shape_of_many_dimensions(tmp_path, size):
    shape = [size] * 60_000
    raw = json.dumps({"t": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(4))
    with pytest.raises(ConvertError, match=f"t.shape: expected a list of sizes .at most {DIMENSIONS}., got") as error:
        read_header(file)
    assert len(str(error.value)) < 500
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [2**30] * 60_000}
    with pytest.raises(ConvertError, match=f"shape: expected a list of sizes .at most {DIMENSIONS}., got"):
        nf4.read_state(json.dumps(state).encode(), file, "t")


def test_an_index_of_many_shards(tmp_path):
    """Every shard is looked up in the index once, not the whole index for every shard."""
    count = 1500
    raw = json.dumps({}).encode()
    for number in range(count):
        (tmp_path / f"{number}.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw)
    names = {f"t{number}": f"{number % count}.safetensors" for number in range(40_000)}
    write_config(tmp_path / INDEX, {"weight_map": names})
    write_config(tmp_path / "config.json", {})
    with pytest.raises(ConvertError, match="missing t") as error:
        open_checkpoint(tmp_path)
    assert len(str(error.value)) < 2000


EXPRESSIONS = {
    "target_modules": (targets, lambda slow: slow),
    "exclude_modules": (targets, lambda slow: slow),
    "modules_to_save": (targets, lambda slow: [slow]),
    "layers_pattern": (targets, lambda slow: [slow]),
    "rank_pattern": (rank_and_alpha, lambda slow: {slow: 3}),
    "alpha_pattern": (rank_and_alpha, lambda slow: {slow: 3}),
}


@pytest.mark.parametrize("field", EXPRESSIONS)
def test_an_expression_that_backtracks_for_ever(field):
    look_up, given = EXPRESSIONS[field]
    options = {"layers_to_transform": [1]} if field == "layers_pattern" else {}
    config = AdapterConfig(**{"target_modules": ["q_proj"], **options, field: given(f"(?#{field}){SLOW}")})
    with pytest.raises(ConvertError, match=r"regular expression .* within 0.1 s"):
        for index in range(100):
            look_up(config, MODULE.replace("11", str(index)))


def test_an_expression_that_a_later_python_may_read_otherwise():
    """The standard library warns of it, and a warning is no answer to a file."""
    assert mistake("[[a]") == ""
    assert "unterminated" in mistake("[[[")


def test_many_names_and_long_ones():
    raw = {"peft_type": "LORA", "target_modules": ["q_proj"]}
    for field, value in [
        ("target_modules", [f"m{n}" for n in range(20_000)]),
        ("rank_pattern", {f"m{n}": 4 for n in range(20_000)}),
        ("target_modules", "a" * 30_000),
        ("modules_to_save", ["b" * 30_000]),
    ]:
        with pytest.raises(ConvertError, match=f"adapter_config.json: {field}: expected at most") as error:
            config_from_json(raw | {field: value}, "adapter_config.json")
        assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    "pattern",
    [r".*\.(q|k)_proj", r"model\.layers\.(1|1\d)\..*", "q_proj", r"(?:.*?(?:attn).*?_proj)", r".*_proj$"],
)
def test_matching_is_that_of_the_standard_library(pattern):
    for name in (MODULE, "lm_head", "model.layers.2.mlp.up_proj", "model.layers.2.mlp.up_proj\n", ""):
        assert bool(fullmatch(pattern, name)) == bool(re.fullmatch(pattern, name))
        assert bool(match(pattern, name)) == bool(re.match(pattern, name))
