"""Attention: norms, rotation and scales against plain sums; what is kept for the backward pass; dropout of weights."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import print_saved_residuals

from convert.families.mapping import read_config
from convert.model.layers import Attention as Settings
from fastjax.execution.remat import checkpointed
from fastjax.models.context import Context
from fastjax.models.layer_inputs import LayerInputs
from fastjax.models.mixers.attention import Attention
from fastjax.models.rotary import inverse_frequencies, query_scales, rope_tables
from fastjax.training.step import make_eval_step
from tests.support import families, steps, tiny

HEADS, KEY_HEADS, SIZE, WIDTH, LENGTH = 4, 2, 10, 32, 24
ORIGINAL, BETA = 5, 0.3


def configured(**changes):
    config = read_config(families.CONFIGS["qwen3"])
    rope = {"original_max_position_embeddings": ORIGINAL, "query_beta": changes.pop("query_beta", None)}
    return dataclasses.replace(
        config, rope=dataclasses.replace(config.rope, kind="default", attention_factor=1.0, **rope), **changes
    )


def arrays():
    rng = np.random.default_rng(0)
    shapes = {"qkv": ((HEADS + 2 * KEY_HEADS) * SIZE, WIDTH), "o": (WIDTH, HEADS * SIZE)}
    found = {name: 0.3 * rng.standard_normal(shape) for name, shape in shapes.items()}
    found |= {name: 1 + 0.5 * rng.standard_normal(SIZE) for name in ("q_norm", "k_norm")}
    return {
        name: array.astype(np.float32)
        for name, array in (found | {"x": rng.standard_normal((1, LENGTH, WIDTH))}).items()
    }


def module_of(config):
    """A module whose heads have SIZE features, and its context."""
    weights = {name: {"weight": jnp.asarray(array), "bias": jnp.zeros(len(array))} for name, array in arrays().items()}
    positions = jnp.arange(LENGTH, dtype=jnp.int32)[None]
    rotary, scales = {"rope": rope_tables(config.rope, SIZE, positions)}, query_scales(config, positions)
    module = Attention(Settings(), LayerInputs(config, 0, {"self_attn": weights}, {}))
    return module, Context(rotary, None, None, query_scales=scales)


def ours(config):
    module, context = module_of(config)
    return np.asarray(module(jnp.asarray(arrays()["x"]), context, None))


def theirs(config, *, norm_last, beta):
    w = {name: array.astype(np.float64) for name, array in arrays().items()}
    q, k, v = np.split(w["x"][0] @ w["qkv"].T, [HEADS * SIZE, (HEADS + KEY_HEADS) * SIZE], axis=1)
    angles = np.arange(LENGTH)[:, None] * inverse_frequencies(config.rope, SIZE).astype(np.float64)

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps) * weight

    def turn(x):
        a, b, (cos, sin) = x[..., : SIZE // 2], x[..., SIZE // 2 :], (np.cos(angles)[:, None], np.sin(angles)[:, None])
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def heads(x, weight):
        x = x.reshape(LENGTH, -1, SIZE)
        return norm(turn(x), weight) if norm_last else turn(norm(x, weight))

    q, k = heads(q, w["q_norm"]), heads(k, w["k_norm"])
    q = q * (1 + beta * np.log(1 + np.floor(np.arange(LENGTH) / ORIGINAL)))[:, None, None]
    k, v = (np.repeat(a.reshape(LENGTH, -1, SIZE), HEADS // KEY_HEADS, axis=1) for a in (k, v))
    scores = np.einsum("shd,thd->hst", q, k) * config.attention_multiplier
    scores = np.where(np.tril(np.ones((LENGTH, LENGTH), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = np.einsum("hst,thd->shd", weights / weights.sum(-1, keepdims=True), v)
    return (out.reshape(LENGTH, -1) @ w["o"].T)[None]


@pytest.mark.parametrize("norm_last", [False, True])
@pytest.mark.parametrize("beta", [None, BETA])
def test_attention_equals_plain_sums(norm_last, beta):
    config = configured(qk_norm_after_rope=norm_last, query_beta=beta)
    assert config.qk_norm == "head" and config.head_dim == SIZE
    expected = theirs(config, norm_last=norm_last, beta=beta or 0.0)
    # float32, sums of up to 40 products
    np.testing.assert_allclose(ours(config), expected, rtol=0, atol=5e-6 * np.abs(expected).max())
    for other in ({"norm_last": not norm_last, "beta": beta or 0.0}, {"norm_last": norm_last, "beta": 0.7}):
        assert np.abs(theirs(config, **other) - expected).max() > 1e-2 * np.abs(expected).max()


def test_queries_have_their_scale_in_their_own_dtype():
    config = configured(query_beta=BETA)
    (scale,) = query_scales(config, jnp.asarray([[0, 4, 5, 23]], jnp.int32)).values()
    assert scale.dtype == jnp.float32
    np.testing.assert_allclose(scale[0], 1 + BETA * np.log([1, 1, 2, 5]), rtol=1e-6)
    assert query_scales(configured(), jnp.zeros((1, 2), jnp.int32)) == {}


@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_turned_heads_are_kept_in_place_of_the_product(family, capsys):
    """But for a norm before the turn, whose backward pass reads the product's parts."""
    config = read_config(families.CONFIGS[family])
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (HEADS, KEY_HEADS, SIZE)
    module, context = module_of(config)

    def layer(x):
        return module(x, context, None)

    print_saved_residuals(checkpointed(layer, "projections", scanned=False), jnp.ones((1, LENGTH, WIDTH)))
    kept = re.findall(r"f32\[([\d,]+)\] named 'projection'", capsys.readouterr().out)
    by_head = [f"1,{LENGTH},{count},{SIZE}" for count in (HEADS, KEY_HEADS, KEY_HEADS)]
    by_part = [f"1,{LENGTH},{count * SIZE}" for count in (HEADS, KEY_HEADS, KEY_HEADS)]
    assert kept == (by_head if config.qk_norm is None else by_part)


RATE = 0.3


@functools.cache
def model(rate, **options):
    """The same weights whatever the rate."""
    config = {"num_hidden_layers": 2} | ({"attention_dropout": rate} if rate else {})
    return tiny.model(tiny.shared_folder(**config), tiny.CONFIG, full_finetuning=True, **options)


def test_the_mean_of_a_layer_over_masks_is_the_layer_without():
    """Attention is linear in its weights after the softmax: what a layer's attention adds is right on the average."""
    decoder = model(RATE).module()
    layer = decoder.layers[0][0]
    leaf = jax.tree.map(lambda x: x[0] if decoder.plan[0].count > 1 else x, layer)
    x = jax.random.normal(jax.random.key(5), (1, 12, 48), jnp.float32)
    positions = jnp.arange(12, dtype=jnp.int32)[None]
    context = Context({"rope": rope_tables(decoder.config.rope, 16, positions)}, None, None)
    draws = jax.jit(jax.vmap(lambda key: leaf.self_attn(x, context, key)))
    found = np.asarray(draws(jax.random.split(jax.random.key(0), 1000)))
    expected = np.asarray(jax.jit(lambda: leaf.self_attn(x, context, None))())
    error = np.abs(found.mean(0) - expected) / (found.std(0) / np.sqrt(len(found)) + 1e-6)
    assert found.std(0).max() > 0.05
    assert error.max() < 5  # standard errors; 576 numbers


def test_a_step_drops_by_its_key_the_same_however_it_is_computed():
    """Recomputed layers draw their masks again, whether they are scanned or not."""
    (batch,) = tiny.batches(tiny.CONFIG, 1)
    other = model(RATE, use_gradient_checkpointing="none", layer_loop="unroll")
    found, again = (steps.gradients(one, batch) for one in (model(RATE), other))
    # float32 in another order
    assert abs(float(found[0]["loss"]) - float(again[0]["loss"])) < 1e-5
    trees = [tiny.by_layer(tree, one.plan) for (_, tree), one in ((found, model(RATE)), (again, other))]
    steps.assert_close(*trees, 1e-4)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(trees[0]["layers"]))
    repeated, other_key = (steps.gradients(model(RATE), batch, key=key) for key in (0, 1))
    steps.assert_same(repeated, found)
    assert abs(float(found[0]["loss"]) - float(other_key[0]["loss"])) > 1e-3


def test_evaluation_drops_nothing():
    (batch,) = tiny.batches(tiny.CONFIG, 1)
    losses = [
        jax.device_get(make_eval_step(m.graphdef, m.trainable_filter)(m.trainable, m.frozen, batch))
        for m in (model(RATE), model(0))
    ]
    steps.assert_same(*losses)
