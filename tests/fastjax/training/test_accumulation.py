"""Eight rows in one, two or eight portions are the same step, however unequal the rows' numbers of targets are, and
however much padding is behind all of them.

Float32, through the step and the optimizer of a run. Sums of some hundred terms in another order differ by a few units
in the last place (6e-8).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from fastjax.data.batches import Batch
from fastjax.models.decoder import lm_logits
from fastjax.training.optimizers import OptimizerConfig, make_optimizer
from fastjax.training.step import init_state, make_train_step
from tests.support import steps, tiny

TOLERANCE = 1e-6
WIDTH = 64
#: Target tokens of each row, which is one document with one more.
TARGETS = (1, 60, 2, 3, 25, 1, 63, 6)
#: With so large an epsilon Adam's update is smooth in the gradient; with a small one it is its sign, also where the
#: gradient is rounding alone. All else that an update depends on is on.
OPTIMIZER = OptimizerConfig(learning_rate=0.5, adam_epsilon=1.0, max_grad_norm=0.3)
#: Weights so small that the model's own rounding stays below the tolerance.
CHANGES = {"initializer_range": 0.06, "tie_word_embeddings": False, "num_hidden_layers": 2}


@functools.cache
def model(kind):
    base = tiny.model(tiny.shared_folder(**CHANGES), tiny.config(**CHANGES), full_finetuning=kind == "full")
    return base if kind == "full" else tiny.adapted(base)


def rows(width=WIDTH):
    documents = tiny.documents(tiny.CONFIG, [count + 1 for count in TARGETS])
    return tiny.rows([[document] for document in documents], width)


@functools.cache
def stepped(kind, portions, width=WIDTH):
    """(metrics, gradients, updates of the weights, new weights) of a step in so many portions."""
    ours = model(kind)
    optimizer = optax.chain(steps.RECORDED, make_optimizer(OPTIMIZER, 10), steps.RECORDED)
    step = make_train_step(ours.graphdef, optimizer, ours.trainable_filter, donate=False)
    batch = Batch(*(array.reshape(portions, -1, width) for array in rows(width)))
    state, metrics = step(init_state(ours.trainable, optimizer, jax.random.key(0)), ours.frozen, batch)
    return jax.device_get((metrics, state.opt_state[0], state.opt_state[-1], state.trainable))


def assert_equal_within_rounding(found, expected):
    """Each tensor within the tolerance of its norm, or of a usual tensor's where that is larger.

    The gradients of q_proj and k_proj are small differences of large terms, whose rounding they keep.
    """
    found, expected = steps.named(found), steps.named(jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), expected))
    assert found.keys() == expected.keys()
    usual = np.sqrt(np.mean([np.sum(leaf**2) for leaf in expected.values()]))
    for name, leaf in expected.items():
        size = np.linalg.norm(leaf)
        assert size > 0, name
        assert np.linalg.norm(found[name] - leaf) < TOLERANCE * max(size, usual), name


@pytest.mark.exhaustive("8, cut-lora")
@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize(("portions", "width"), [(2, WIDTH), (8, WIDTH), (8, 96)], ids=["2", "8", "8, cut"])
def test_portions_of_one_step(kind, portions, width):
    """The last are cut: the whole step has rows of half as many tokens again, which are padding."""
    whole, parts = stepped(kind, 1, width), stepped(kind, portions)
    assert whole[0]["num_targets"] == parts[0]["num_targets"] == sum(TARGETS)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(parts[0][name], whole[0][name], rtol=TOLERANCE)
    for found, expected in zip(parts[1:], whole[1:], strict=True):
        assert_equal_within_rounding(found, expected)


@functools.cache
def reference(kind):
    """(each row's loss sum, number of right tokens, gradient of the mean over all tokens), plainly and at once."""
    ours = model(kind)
    tokens, targets, segments, positions = rows()

    def mean(trainable):
        decoder = nnx.merge(ours.graphdef, trainable, ours.frozen)
        logits = lm_logits(decoder.lm_head, decoder(tokens, positions, segments))
        log_probability = jax.nn.log_softmax(logits)
        chosen = jnp.take_along_axis(log_probability, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
        losses = -jnp.sum(chosen, axis=1, where=targets != -100)
        return jnp.sum(losses) / sum(TARGETS), (losses, jnp.sum(jnp.argmax(logits, axis=-1) == targets))

    grads, (losses, correct) = jax.device_get(jax.jit(jax.grad(mean, has_aux=True))(ours.trainable))
    return losses.astype(np.float64), correct, grads


@pytest.mark.exhaustive("8-lora")
@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("portions", [1, 8])
def test_the_loss_is_the_mean_over_all_tokens_at_once(kind, portions):
    losses, correct, grads = reference(kind)
    metrics, found, *_ = stepped(kind, portions)
    np.testing.assert_allclose(metrics["loss"], losses.sum() / sum(TARGETS), rtol=TOLERANCE)
    assert metrics["num_correct"] == correct
    assert_equal_within_rounding(found, grads)
    mean_of_means = np.mean(losses / TARGETS)
    assert abs(mean_of_means / metrics["loss"] - 1) > 1e-3  # the tolerance would see it
