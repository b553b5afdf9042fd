"""Dropout of attention weights, as config.json asks for it: in training alone, by the step's key."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from fastjax.models.context import Context
from fastjax.models.rotary import rope_tables
from fastjax.training.step import make_eval_step
from tests.support import steps, tiny

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
