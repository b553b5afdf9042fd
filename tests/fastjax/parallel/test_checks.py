"""Meshes that a model cannot be trained on."""

import dataclasses

import pytest

from convert.families.mapping import read_config
from fastjax.errors import ConfigError
from fastjax.parallel import MeshShape, check_mesh
from tests.support import families, tiny

CONFIG = read_config(tiny.config())
MIXTURE = read_config(families.MIXTURES["qwen2_moe"])
NORMED = dataclasses.replace(CONFIG, qk_norm="projection")
RECURRENT = read_config(families.CONFIGS["qwen3_5_text"])
FUSED = dataclasses.replace(CONFIG, fused=True)
DROPPED = dataclasses.replace(CONFIG, attention_dropout=0.1)


def test_a_mesh_that_serves_the_model_is_taken():
    check_mesh(CONFIG, MeshShape(data=8, fsdp=2, context=4, tensor=2))
    check_mesh(MIXTURE, MeshShape(data=8, fsdp=2, expert=4))


@pytest.mark.parametrize(
    ("config", "axes", "message"),
    [
        (MIXTURE, {"context": 2}, "parallel.context: expected 1 of a model with mixtures of experts, got 2"),
        (MIXTURE, {"expert": 3}, "parallel.expert: expected a divisor of the 4 experts, got 3"),
        (CONFIG, {"expert": 2}, "parallel.expert: expected 1 of a model without mixtures of experts, got 2"),
        (DROPPED, {"context": 4}, "parallel.context: expected 1 where attention_dropout is not 0"),
        (CONFIG, {"tensor": 3}, "parallel.tensor: expected a divisor of num_attention_heads 4, got 3"),
        (CONFIG, {"tensor": 4}, "parallel.tensor: expected a divisor of num_key_value_heads 2, got 4"),
        (MIXTURE, {"tensor": 2}, "parallel.tensor: expected 1 of a model with mixtures of experts"),
        (NORMED, {"tensor": 2}, "parallel.tensor: expected 1 of a model that normalises queries and keys"),
        (RECURRENT, {"context": 2}, "parallel.context: expected 1 of a model with Gated DeltaNet"),
        (RECURRENT, {"tensor": 2}, "parallel.tensor: expected 1 of a model with Gated DeltaNet"),
        (FUSED, {"tensor": 2}, "parallel.tensor: expected 1 of a model whose files hold"),
    ],
)
def test_what_does_not_serve_it_is_refused_by_name(config, axes, message):
    with pytest.raises(ConfigError, match=message):
        check_mesh(config, MeshShape(**axes))


@pytest.mark.parametrize(
    ("adapters", "message"),
    [({"lora_dropout": 0.1}, "where lora_dropout is not 0"), ({"use_dora": True}, "with use_dora")],
)
def test_adapters_that_read_whole_rows_are_not_split(adapters, message):
    check_mesh(CONFIG, MeshShape(context=2), **adapters)
    with pytest.raises(ConfigError, match=f"parallel.tensor: expected 1 .*{message}"):
        check_mesh(CONFIG, MeshShape(tensor=2), **adapters)
