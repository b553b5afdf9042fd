"""Adam's moments in the host's memory: the same steps, kept by one that is not finite, stored and read either way."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastjax.errors import ConfigError
from fastjax.host_memory import in_host_memory
from fastjax.training.cadence import Progress
from fastjax.training.checkpoint import Checkpoints
from fastjax.training.config import DataSection, ModelSection, OutputSection, TrainConfig, TrainingSection
from fastjax.training.optimizers import OptimizerConfig, adam, make_optimizer
from fastjax.training.step import init_state, make_train_step
from tests.support import steps, tiny

CONFIG = tiny.config(num_hidden_layers=3, vocab_size=128)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Trained whole: stacks of matrices and of norms, a table, single vectors."""
    return tiny.model(tmp_path_factory.mktemp("base"), CONFIG, full_finetuning=True)


@functools.cache
def optimizer(name, offload):
    return make_optimizer(OptimizerConfig(name=name, learning_rate=1e-2), 8, offload=offload)


def trained(model, name, offload):
    """The state after two steps and one that is not finite; the losses."""
    step = make_train_step(model.graphdef, optimizer(name, offload), model.trainable_filter)
    state = init_state(model.trainable, optimizer(name, offload), jax.random.key(0))
    places, losses = jax.tree.map(in_host_memory, state), []
    *batches, last = tiny.batches(CONFIG, 3)
    for batch in batches:
        state, metrics = step(state, model.frozen, batch)
        losses.append(float(metrics["loss"]))
    assert bool(metrics["finite"])
    infinite = jax.tree.map(lambda array: array * jnp.inf, state.trainable["norm"])
    broken = state._replace(trainable={**state.trainable, "norm": infinite})
    before = jax.device_get(state.opt_state)
    state, metrics = step(broken, model.frozen, last)
    assert not bool(metrics["finite"])
    steps.assert_same(jax.device_get(state.opt_state), before)
    assert jax.tree.map(in_host_memory, state) == places
    return state, losses


@pytest.mark.exhaustive("adamw_8bit")
@pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
def test_steps_are_the_same(model, name, tmp_path, monkeypatch):
    monkeypatch.setattr(adam, "PART_BYTES", 2**12)  # the table's in eight parts
    (moved, losses), (plain, expected) = (trained(model, name, offload) for offload in (True, False))
    moments = [leaf for leaf in jax.tree.leaves(moved.opt_state) if leaf.ndim > 1]
    assert len(moments) > 10 and all(map(in_host_memory, moments))
    assert not any(map(in_host_memory, jax.tree.leaves((plain, moved.trainable))))
    assert losses == expected
    # The compiler may contract products with sums here and not there: one rounding of a number near one.
    steps.assert_close(moved.opt_state[1].mu, plain.opt_state[1].mu, 1e-6)
    found, other = (jax.tree.leaves({**state.trainable, "norm": 0}) for state in (moved, plain))
    for array, right in zip(found, other, strict=True):
        np.testing.assert_allclose(array, right, rtol=0, atol=2e-7)

    checkpoints = Checkpoints(tmp_path)
    for step, (saved, like) in enumerate(((moved, plain), (plain, moved)), 1):
        checkpoints.save(saved, Progress(step=step))
        checkpoints.wait()
        loaded = checkpoints.load(step, like)
        steps.assert_same(jax.device_get(loaded.opt_state), jax.device_get(saved.opt_state))
        assert jax.tree.map(in_host_memory, loaded) == jax.tree.map(in_host_memory, like)
    checkpoints.close()


def test_another_rule_is_refused():
    sections = ModelSection("m"), DataSection("d"), OutputSection("o")
    with pytest.raises(ConfigError, match="training.offload_optimizer: expected false with optimizer.name: lion, got"):
        TrainConfig(*sections, optimizer=OptimizerConfig(name="lion"), training=TrainingSection(offload_optimizer=True))
