"""Paths know the parts that they are made of."""

import copy
import pickle

import pytest

from convert.model.paths import LEAVES, WeightPath

PARTS = [
    (3, "self_attn", "q_proj", "weight"),
    (12, "", "input_layernorm", "weight"),
    (0, "mlp", "down_proj", "lora_A"),
    (0, "self_attn", "k_proj", ""),
    (None, "", "lm_head", "modules_to_save.weight"),
    (None, "", "embed_tokens", "base_layer.weight"),
    (None, "self_attn", "q_norm", "weight"),
]


@pytest.mark.parametrize("parts", PARTS)
def test_joined_and_taken_apart(parts):
    path = WeightPath(*parts)
    assert path == ".".join(("layers", str(parts[0])) * (parts[0] is not None) + tuple(filter(None, parts[1:])))
    for same in (path, WeightPath.parse(str(path)), pickle.loads(pickle.dumps(path)), copy.deepcopy(path)):
        assert same == path and (same.layer, same.block, same.part, same.leaf) == parts


@pytest.mark.parametrize("leaf", LEAVES)
def test_every_leaf(leaf):
    path = WeightPath.parse(f"layers.7.mlp.up_proj.{leaf}")
    assert path.leaf == leaf and path.module == "layers.7.mlp.up_proj" and path.inside == f"mlp.up_proj.{leaf}"
    assert path.in_layer(2).with_leaf("bias") == "layers.2.mlp.up_proj.bias"


@pytest.mark.parametrize(
    "text", ["layers.3", "layers", "x", "layers.x.mlp", "layers.99999999999.mlp.up_proj", "", "a.weight.b"]
)
def test_other_names_stay_as_they_are(text):
    assert WeightPath.parse(text) == text and WeightPath.parse(text).layer is None
