"""Norms by leaf and layer, which leaves are judged when, and which rows break a step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastjax.data.batches import Batch
from fastjax.errors import TrainingError
from fastjax.models.layout import LayerStack
from fastjax.training.health import GradientCheck, leaf_names, non_finite_rows, squared_norms

PLAN = (LayerStack(0, 1, 1), LayerStack(1, 2, 3), LayerStack(7, 1, 1))


def tree():
    rng = np.random.default_rng(0)

    def leaf(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    return {
        "embed_tokens": {"weight": leaf(5, 3)},
        "layers": {
            0: {0: {"mlp": {"down": {"lora_A": leaf(2, 3)}}}},
            1: {0: {"norm": leaf(3, 4)}, 1: {"norm": leaf(3, 4)}},
            2: {0: {"bias": leaf(4).astype(jnp.bfloat16)}},
        },
    }


def test_one_norm_a_leaf_and_layer():
    names, norms = leaf_names(tree(), PLAN), np.asarray(jax.jit(squared_norms, static_argnums=1)(tree(), PLAN))
    assert names == [
        "embed_tokens.weight",
        "layers.0.mlp.down.lora_A",
        *(f"layers.{n}.norm" for n in (1, 3, 5, 2, 4, 6)),
        "layers.7.bias",
    ]
    named = dict(zip(names, norms, strict=True))
    layers = tree()["layers"]
    assert named["layers.5.norm"] == pytest.approx(np.sum(np.square(layers[1][0]["norm"][2])), rel=1e-6)
    assert named["layers.4.norm"] == pytest.approx(np.sum(np.square(layers[1][1]["norm"][1])), rel=1e-6)
    assert named["layers.7.bias"] == pytest.approx(
        np.sum(np.square(layers[2][0]["bias"].astype(jnp.float32))), rel=1e-6
    )
    assert named["embed_tokens.weight"] == pytest.approx(np.sum(np.square(tree()["embed_tokens"]["weight"])), rel=1e-6)


NAMES = ["layers.0.q_proj.lora_A", "layers.0.q_proj.lora_B", "norm.weight"]


def judge(*steps, rates=None, names=NAMES, **options):
    check = GradientCheck(names, **options)
    for number, norms in enumerate(steps):
        rate = 1.0 if rates is None else rates[number]
        check.step(np.asarray(norms, np.float32), rate, last=number == len(steps) - 1)
    return check.done


def test_a_half_that_rests_in_the_first_step_is_alive():
    assert judge([0, 1, 1], [1, 1, 1], [1, 1, 1])


def test_warm_up_from_zero_postpones_the_judgement():
    """With a learning rate of zero B has not moved, and A has no gradient yet in the second step."""
    assert judge([0, 1, 1], [0, 1, 1], [1, 1, 1], [1, 1, 1], rates=[0.0, 0.5, 1.0, 1.0])
    with pytest.raises(TrainingError, match="1 of 3 trained weights .*: layers.0.q_proj.lora_A. They would"):
        judge([0, 1, 1], [0, 1, 1], [0, 1, 1], rates=[0.0, 0.5, 1.0])


def test_dead_leaves_are_named():
    with pytest.raises(TrainingError, match="2 of 3 .*: layers.0.q_proj.lora_A, norm.weight. They"):
        judge([0, 1, 0], [0, 1, 0], [1, 1, 1])
    with pytest.raises(TrainingError, match="1 of 3 .*: norm.weight"):
        judge([0, 1, 0])  # a run of one step: halves cannot be judged
    with pytest.raises(TrainingError, match="20 of 20 .*: n0, n1, .* n9 and 10 more"):
        judge([0] * 20, [0] * 20, names=[f"n{n}" for n in range(20)])
    assert judge([1, 1, 0], [1, 1, 0], may_be_zero=lambda name: name == "norm.weight")


def test_a_leaf_that_had_a_gradient_once_is_alive():
    assert judge([1, 1, 1], [1, 1, 0], [0, 0, 0])


def test_the_rows_that_break_a_step():
    tokens = np.arange(2 * 3 * 4, dtype=np.int32).reshape(2, 3, 4)
    batch = Batch(tokens, tokens, tokens, tokens)

    def probe(rows):
        assert rows.tokens.shape == (1, 1, 4)
        return jnp.float32(np.nan if 9 in rows.tokens else 1.0), jnp.float32(np.inf if 20 in rows.targets else 1.0)

    assert non_finite_rows(probe, batch) == [(0, 2), (1, 2)]
    assert non_finite_rows(lambda rows: (jnp.float32(0), jnp.float32(0)), batch) == []
