"""The loss of reward models: scores at the answers' last tokens beside the model's own, whatever the packing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fastjax.data.batches import batch_of
from fastjax.data.packing import PackedRows
from fastjax.data.preferences import Answer, Role, pack_preferences
from fastjax.errors import ConfigError
from fastjax.parallel import make_mesh
from fastjax.training.preferences import RewardLoss
from fastjax.training.step import make_eval_step
from tests.support import steps, tiny

LENGTHS = ((5, 7, 3), (2, 9, 8), (6, 1, 4), (3, 5, 6))
MARGINS, CENTRE = (0.0, 0.5, -0.25, 1.0), 0.1
TOLERANCE = 2e-5  # float32, scores of order one


@functools.cache
def model():
    """The score is drawn wide, so that no score is near zero."""
    base = tiny.model(tiny.shared_folder(num_hidden_layers=2), tiny.config(num_hidden_layers=2)).with_score_head(5)
    return tiny.adapted(base, target_modules=["q_proj", "down_proj"])


def packed(length):
    rng, pairs, roles = np.random.default_rng(3), [], (Role.CHOSEN, Role.REJECTED)
    for lengths in LENGTHS:
        prompt, *answers = (rng.integers(0, 100, size).tolist() for size in lengths)
        pairs.append([Answer(prompt, one, role) for one, role in zip(answers, roles, strict=True)])
    rows = pack_preferences(pairs, length, last_token=True)
    fields = {**rows.fields, "margins": np.repeat(np.float32(MARGINS), 2)}
    return PackedRows(rows.documents, rows.order, rows.offsets, length, None, fields)


def scores(rows):
    """Scores of each document alone, from the hidden state of its last token."""
    decoder, found = model().module(), []
    weight = np.asarray(decoder.score.weight[...])[0]
    for document in range(len(rows.documents)):
        tokens = rows.documents.tokens[slice(*rows.documents.offsets[document : document + 2])]
        padded = np.zeros((1, 16), np.int32)  # causal: what is behind does not matter, and one program serves all
        padded[0, : len(tokens)] = tokens
        hidden = _hidden(model().graphdef, model().trainable, model().frozen, padded)
        found.append(float(np.asarray(hidden)[0, len(tokens) - 1] @ weight))
    return np.asarray(found).reshape(-1, 2)


@functools.partial(jax.jit, static_argnums=0)
def _hidden(graphdef, trainable, frozen, tokens):
    return nnx.merge(graphdef, trainable, frozen)(tokens, jnp.arange(tokens.shape[1], dtype=jnp.int32)[None])


def test_scores_losses_and_packing():
    rows = packed(48)
    expected = scores(rows)
    order = rows.order[::2] // 2
    assert len(rows) == 2 and sorted(order.tolist()) == [0, 1, 2, 3]
    step = make_eval_step(
        model().graphdef, model().trainable_filter, loss=RewardLoss(center_rewards_coefficient=CENTRE)
    )
    first, second = expected.T
    losses = np.log1p(np.exp(-(first - second - np.asarray(MARGINS)))) + CENTRE * (first + second) ** 2
    together = batch_of(rows, np.asarray([[0, 1, -1, -1]]), 8)
    alone = batch_of(_apart(rows), np.asarray([[0, 1, 2, 3]]), 8)
    for batch in (together, alone):
        sums = jax.device_get(step(model().trainable, model().frozen, batch))
        assert sums.weight == 4
        np.testing.assert_allclose(sums.loss_sum, losses.sum(), rtol=TOLERANCE)
        metrics = {
            "rewards/chosen": first.sum(),
            "rewards/rejected": second.sum(),
            "rewards/margins": (first - second).sum(),
            "rewards/accuracies": (first > second).sum(),
            "rewards/mean": (first + second).sum() / 2,
        }
        assert set(sums.metrics) == set(metrics)
        for name, value in metrics.items():
            np.testing.assert_allclose(sums.metrics[name], value, atol=4 * TOLERANCE, err_msg=name)
    roles = np.where(together.extra["roles"] == Role.REJECTED, Role.NONE, together.extra["roles"])
    unpaired = together._replace(extra={**together.extra, "roles": roles.astype(np.int32)})
    assert np.isnan(step(model().trainable, model().frozen, unpaired).loss_sum)


def test_rows_and_tokens_over_devices():
    loss, batch = RewardLoss(center_rewards_coefficient=CENTRE), batch_of(packed(48), np.asarray([[0, 1]]), 8)
    metrics, gradients = steps.gradients(model(), batch, loss=loss)
    there, found = steps.gradients(model(), batch, loss=loss, mesh=make_mesh(data=2, context=2))
    np.testing.assert_allclose(there["loss"], metrics["loss"], rtol=TOLERANCE)
    assert np.abs(gradients["score"]["weight"]).max() > 0.1
    steps.assert_close(found, gradients, TOLERANCE)


def _apart(rows):
    """Each pair in a row of its own."""
    return PackedRows(rows.documents, np.arange(8), np.arange(0, 9, 2), rows.row_length, None, rows.fields)


def test_a_model_with_logits_is_refused():
    base = tiny.model(tiny.shared_folder(num_hidden_layers=2), tiny.config(num_hidden_layers=2))
    with pytest.raises(ConfigError, match="model: expected one with a score in place of logits"):
        RewardLoss()(base.module(), base.trainable_filter, None, key=None)
    with pytest.raises(
        ValueError, match="RewardLoss.center_rewards_coefficient: expected a number of at least 0, got -1"
    ):
        RewardLoss(center_rewards_coefficient=-1)
