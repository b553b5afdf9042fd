"""Beside the cross-entropy: label smoothing, z-loss, the routers' losses, dropout between a layer and the residual."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fastjax.lora.dropout import drop
from fastjax.models import moe, residual_stream
from fastjax.models.decoder import lm_logits
from fastjax.training.loss import loss_sums
from pallas_kernels import moe_routing
from pallas_kernels.cross_entropy.reference import cross_entropy
from pallas_kernels.moe_routing import reference
from tests.support import families, steps, tiny


def sums(model, *, key=None):
    (batch,) = tiny.batches(dataclasses.asdict(model.config), 1)
    rows = jax.tree.map(lambda array: array[0], batch)
    return jax.device_get(loss_sums(model.module(), model.trainable_filter, rows, key=key))


@pytest.mark.exhaustive("trained and tied", "adapted")
@pytest.mark.parametrize("kind", ["frozen", "trained and tied", "adapted"])
def test_smoothing_and_z_loss_are_of_training_alone_and_reported_apart(kind):
    """Beside whole logits of the same model, in value and in the gradient of every trained array."""
    full = kind == "trained and tied"
    folder = tiny.shared_folder(tie_word_embeddings=full)
    model = tiny.model(folder, tiny.CONFIG, full_finetuning=full)
    if not full:
        model = tiny.adapted(model, target_modules=["q_proj", "lm_head"] if kind == "adapted" else ["q_proj"])
    (batch,) = tiny.batches(tiny.CONFIG, 1)
    rows = jax.tree.map(lambda array: array[0], batch)

    def ours(trainable, key):
        decoder = nnx.merge(model.graphdef, trainable, model.frozen)
        terms = {"label_smoothing_factor": 0.2, "z_loss_coef": 0.05}
        found = loss_sums(decoder, model.trainable_filter, rows, key=key, chunk_size=7, **terms)
        return found.loss_sum, found

    def whole(trainable):
        decoder = nnx.merge(model.graphdef, trainable, model.frozen)
        hidden = decoder.head_input(decoder.forward(rows.tokens, rows.positions, rows.segment_ids).hidden, None)
        logits = lm_logits(decoder.lm_head, hidden)
        found = cross_entropy(logits, rows.targets, label_smoothing=0.2, z_loss=0.05)
        return found.loss_sum, found

    (_, found), gradients = jax.jit(jax.value_and_grad(ours, has_aux=True))(model.trainable, jax.random.key(0))
    (_, expected), wanted = jax.jit(jax.value_and_grad(whole, has_aux=True))(model.trainable)
    np.testing.assert_allclose(found.loss_sum, expected.loss_sum, rtol=1e-5)
    np.testing.assert_allclose(found.metrics["cross_entropy"], expected.cross_entropy_sum, rtol=1e-5)
    np.testing.assert_allclose(found.metrics["z_loss"], expected.z_loss_sum, rtol=1e-5)
    steps.assert_close(gradients, wanted, 1e-4)  # float32 sums over the vocabulary and the tokens, in another order
    _, evaluated = ours(model.trainable, None)
    np.testing.assert_allclose(evaluated.loss_sum, expected.cross_entropy_sum, rtol=1e-5)
    assert set(evaluated.metrics) == {"num_targets", "num_correct"}


def test_routers_losses_weigh_as_much_as_the_target_tokens(tmp_path):
    """Added where there is a key, over all mixtures together, without padding, with gradients for the routers."""
    config = families.MIXTURES["olmoe"] | {"attention_dropout": 0.0}
    model = tiny.model(tmp_path, config, full_finetuning=True)
    (batch,) = tiny.batches(config, 1)
    rows = jax.tree.map(lambda array: array[0], batch)
    assert np.any(rows.segment_ids == 0)
    coefficients = {"router_aux_loss_coef": 0.25, "router_z_loss_coef": 0.125}

    @functools.partial(jax.jit, static_argnums=0)
    def run(coefficients, trainable, key):
        def loss(trainable):
            decoder = nnx.merge(model.graphdef, trainable, model.frozen)
            found = loss_sums(decoder, model.trainable_filter, rows, key=key, **dict(coefficients))
            return found.loss_sum, found

        return jax.value_and_grad(loss, has_aux=True)(trainable)

    key = jax.random.key(0)
    (_, plain), before = run((), model.trainable, key)
    (_, added), after = run(tuple(coefficients.items()), model.trainable, key)
    (_, evaluated), _ = run(tuple(coefficients.items()), model.trainable, None)
    plain, added, evaluated = jax.device_get((plain, added, evaluated))
    count, mask = plain.metrics["num_targets"], (rows.segment_ids != 0).reshape(-1)
    assert evaluated.loss_sum == plain.loss_sum and count > 0
    logits, chosen = recorded(model, rows)
    layers = np.tile(mask, len(logits) // mask.size)
    balance = reference.load_balancing_loss(logits, chosen, layers)
    expected = 0.25 * balance + 0.125 * reference.z_loss(logits, layers)
    # float32 of a few hundred
    np.testing.assert_allclose((added.loss_sum - plain.loss_sum) / count, expected, rtol=1e-4)
    np.testing.assert_allclose(plain.metrics["router_load_balancing_loss"] / count, balance, rtol=1e-5)
    shares = [own[mask].astype(bool).mean(0) / 3 for own in np.split(chosen, len(logits) // mask.size)]
    largest, entropy = (plain.metrics[f"router_{name}"] / count for name in ("largest_share", "entropy"))
    np.testing.assert_allclose(largest, np.mean([share.max() for share in shares]), rtol=1e-5)
    even = np.mean([-np.sum(share * np.log(share)) / np.log(4) for share in shares])
    np.testing.assert_allclose(entropy, even, rtol=1e-5)
    routers = [tree["layers"][0][0]["mlp"]["router"]["weight"] for tree in (before, after)]
    assert np.any(np.abs(routers[0] - routers[1]) > 1e-3)


def recorded(model, rows):
    """Logits and dense weights of the routers, layer after layer: the block's own, caught where they are measured."""
    caught = []

    def measured(routing, mask):
        jax.debug.callback(lambda *arrays: caught.append(arrays), routing.logits, routing.experts, ordered=True)
        return moe_routing.measure_load(routing, mask)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe, "measure_load", measured)
        model.module().forward(rows.tokens, rows.positions, rows.segment_ids).sums["chosen"].block_until_ready()
    jax.effects_barrier()
    logits, experts = (np.concatenate(arrays) for arrays in zip(*caught, strict=True))
    chosen = np.zeros(logits.shape)
    np.put_along_axis(chosen, experts, 1.0, axis=1)
    return logits, chosen


def test_dropout_is_of_embeddings_and_both_blocks_and_of_training_alone(monkeypatch, tmp_path):
    rate = 0.3
    config = families.CONFIGS["starcoder2"] | {"residual_dropout": rate, "embedding_dropout": rate}
    model = tiny.model(tmp_path, config, full_finetuning=True, layer_loop="unroll")
    whole = tiny.model(tmp_path / "none", families.CONFIGS["starcoder2"], full_finetuning=True, layer_loop="unroll")
    dropped = []

    def recorded(x, key, name, rate):
        y = drop(x, key, name, rate)
        dropped.append((name, rate, float(jnp.mean(y == 0)) if key is not None else 0.0))
        return y

    monkeypatch.setattr(residual_stream, "drop", recorded)
    monkeypatch.setattr("fastjax.models.decoder.drop", recorded)
    monkeypatch.setattr("fastjax.execution.loop.checkpointed", lambda block, *_, **__: block)
    with jax.disable_jit():  # layers are traced once and jitted; here their masks are looked at
        expected = sums(whole).loss_sum
        assert sums(model).loss_sum == expected
        assert {share for _, _, share in dropped} == {0.0}
        dropped.clear()
        assert sums(model, key=jax.random.key(0)).loss_sum != expected
    own = [one for one in dropped if one[1] == rate]
    assert [name for name, _, _ in own] == ["embed_tokens", *["self_attn", "mlp"] * config["num_hidden_layers"]]
    # thousands of elements: three standard deviations are 0.03
    assert all(abs(share - rate) < 0.05 for _, _, share in own)
