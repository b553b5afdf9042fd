"""The table: names, paths and shapes of Llamas, and what a config can have wrong."""

import pytest

from convert.errors import ConvertError
from convert.families import family_for


def test_order_and_shapes(llama_config):
    rows = family_for(llama_config).specs(llama_config)
    paths = [row.path for row in rows]
    assert paths[0] == "embed_tokens.weight" and paths[-2:] == ["norm.weight", "lm_head.weight"]
    layers = [int(path.split(".")[1]) for path in paths if path.startswith("layers.")]
    assert layers == sorted(layers) and set(layers) == {0, 1, 2}
    shapes = {row.path: row.shape for row in rows}
    assert shapes["embed_tokens.weight"] == shapes["lm_head.weight"] == (23, 24)
    assert shapes["layers.2.self_attn.q_proj.weight"] == (20, 24)
    assert shapes["layers.2.self_attn.k_proj.weight"] == (10, 24)
    assert shapes["layers.2.self_attn.v_proj.bias"] == (10,)
    assert shapes["layers.2.self_attn.o_proj.weight"] == (24, 20)
    assert shapes["layers.2.self_attn.o_proj.bias"] == (24,)
    assert shapes["layers.2.mlp.down_proj.weight"] == (24, 20)
    assert shapes["layers.2.mlp.gate_proj.bias"] == (20,)
    assert all(row.name == (row.path if row.path == "lm_head.weight" else f"model.{row.path}") for row in rows)


def test_absent_fields_mean_what_transformers_means(llama_config):
    for field in ("head_dim", "num_key_value_heads", "attention_bias", "mlp_bias", "tie_word_embeddings"):
        del llama_config[field]
    shapes = {row.path: row.shape for row in family_for(llama_config).specs(llama_config)}
    assert shapes["layers.0.self_attn.k_proj.weight"] == (24, 24)
    assert not any(path.endswith(".bias") for path in shapes)
    assert "lm_head.weight" in shapes


def test_a_tied_head_has_no_row(llama_config):
    family, tied = family_for(llama_config), llama_config | {"tie_word_embeddings": True}
    assert "lm_head.weight" not in {row.path for row in family.specs(tied)}
    rule = family.ignores("lm_head.weight", tied)
    assert rule is not None and rule.same_as == "embed_tokens.weight"
    assert family.ignores("lm_head.weight", llama_config) is None
    assert family.ignores("model.layers.12.self_attn.rotary_emb.inv_freq", llama_config) is not None


def test_module_names_both_ways(llama_config):
    family = family_for(llama_config)
    for path, name in [
        ("layers.11.mlp.up_proj", "model.layers.11.mlp.up_proj"),
        ("embed_tokens", "model.embed_tokens"),
        ("lm_head", "lm_head"),
    ]:
        assert family.module_name(path) == name and family.module_path(name) == path
    assert family.is_layer_linear("model.layers.3.self_attn.o_proj")
    for other in ("lm_head", "model.embed_tokens", "model.layers.3.input_layernorm", "model.layers.3.mlp", "x"):
        assert not family.is_layer_linear(other)
    with pytest.raises(ConvertError, match=r"layers\.0\.mlp\.experts: no such module in the table of llama"):
        family.module_name("layers.0.mlp.experts")


@pytest.mark.parametrize("model_type", ["gpt2", None, 3, ["llama"]])
def test_an_unknown_family_is_named_with_those_that_are_known(model_type):
    with pytest.raises(
        ConvertError, match=r"some/config\.json: model_type: expected one of llama, qwen2, .*, cohere, .*, got"
    ):
        family_for({"model_type": model_type}, "some/config.json")


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("hidden_size", None, "a positive integer"),
        ("num_hidden_layers", "3", "a positive integer"),
        ("vocab_size", -1, "a positive integer"),
        ("head_dim", True, "a positive integer"),
        ("num_key_value_heads", 0, "a positive integer"),
        ("attention_bias", "yes", "true or false"),
        ("tie_word_embeddings", 1, "true or false"),
    ],
)
def test_a_wrong_field_is_named(llama_config, field, value, expected):
    llama_config[field] = value
    with pytest.raises(ConvertError, match=rf"config\.json: {field}: expected {expected}, got {value!r}"):
        family_for(llama_config).specs(llama_config)
