"""What the cross-entropy is not: auxiliary losses of the layers, and dropout between a layer and the residual."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastjax.lora.dropout import drop
from fastjax.models import layer as layers
from fastjax.training.loss import loss_sums
from tests.support import families, tiny


def sums(model, *, key=None):
    (batch,) = tiny.batches(dataclasses.asdict(model.config), 1)
    rows = jax.tree.map(lambda array: array[0], batch)
    return jax.device_get(loss_sums(model.module(), model.trainable_filter, rows, key=key))


def test_auxiliary_losses_weigh_as_much_as_the_target_tokens(monkeypatch):
    model = tiny.model(tiny.shared_folder(), tiny.CONFIG, full_finetuning=True)
    before, call = sums(model), layers.DecoderLayer.__call__

    def with_losses(self, x, context, key, cache):
        y, cache, losses = call(self, x, context, key, cache)
        return y, cache, losses | {"balance": jnp.float32(0.25), "z": jnp.float32(2.0)}

    monkeypatch.setattr(layers.DecoderLayer, "__call__", with_losses)
    after = sums(model)
    count = before.metrics["num_targets"]
    assert count > 0 and after.metrics["num_targets"] == count
    added = model.config.num_hidden_layers * 2.25 * count
    np.testing.assert_allclose(after.loss_sum - before.loss_sum, added, rtol=1e-6)  # float32 of a few hundred


@pytest.mark.one_world
def test_residual_dropout_is_of_both_blocks_and_of_training_alone(monkeypatch, tmp_path):
    rate = 0.3
    config = families.CONFIGS["seed_oss"] | {"residual_dropout": rate}
    model = tiny.model(tmp_path, config, full_finetuning=True, layer_loop="unroll")
    whole = tiny.model(tmp_path / "none", families.CONFIGS["seed_oss"], full_finetuning=True, layer_loop="unroll")
    dropped = []

    def recorded(x, key, name, rate):
        y = drop(x, key, name, rate)
        dropped.append((name, rate, float(jnp.mean(y == 0)) if key is not None else 0.0))
        return y

    monkeypatch.setattr(layers, "drop", recorded)
    monkeypatch.setattr("fastjax.models.layer_loop.checkpointed", lambda block, *_, **__: block)
    assert sums(model).loss_sum == sums(whole).loss_sum
    assert {share for _, _, share in dropped} == {0.0}
    dropped.clear()
    assert sums(model, key=jax.random.key(0)).loss_sum != sums(whole).loss_sum
    own = [one for one in dropped if one[1] == rate]
    assert [name for name, _, _ in own] == ["self_attn", "mlp"] * config["num_hidden_layers"]
    # thousands of elements: three standard deviations are 0.03
    assert all(abs(share - rate) < 0.05 for _, _, share in own)
