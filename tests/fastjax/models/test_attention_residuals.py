"""What attention keeps for the backward pass where projections are kept."""

import re

import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import print_saved_residuals

from convert.families.mapping import read_config
from convert.model.layers import Attention as Settings
from fastjax.execution.remat import checkpointed
from fastjax.models.context import Context
from fastjax.models.mixers.attention import Attention
from fastjax.models.norms import Norm
from fastjax.models.projection import Projection
from fastjax.models.rotary import rope_tables
from tests.support import families

WIDTH, LENGTH = 32, 24


@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_turned_heads_are_kept_in_place_of_the_product(family, capsys):
    """But for a norm before the turn, whose backward pass reads the product's parts."""
    config = read_config(families.CONFIGS[family])
    heads, key_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    norms = None if config.qk_norm is None else (Norm(config, jnp.ones(size)), Norm(config, jnp.ones(size)))
    sizes = [("q_proj", heads * size), ("k_proj", key_heads * size), ("v_proj", key_heads * size)]
    qkv = Projection(sizes, jnp.ones((sum(rows for _, rows in sizes), WIDTH)))
    module = Attention(config, Settings(), qkv, Projection([("o_proj", WIDTH)], jnp.ones((WIDTH, heads * size))), norms)
    tables = rope_tables(config.rope, size, jnp.arange(LENGTH, dtype=jnp.int32)[None])

    def layer(x):
        return module(x, Context({"rope": tables}, None, None), None)

    print_saved_residuals(checkpointed(layer, "projections", scanned=False), jnp.ones((1, LENGTH, WIDTH)))
    kept = re.findall(r"f32\[([\d,]+)\] named 'projection'", capsys.readouterr().out)
    by_head = [f"1,{LENGTH},{count},{size}" for count in (heads, key_heads, key_heads)]
    by_part = [f"1,{LENGTH},{rows}" for _, rows in sizes]
    assert kept == (by_head if norms is None else by_part)
