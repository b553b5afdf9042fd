"""Metrics and exact gradients of one train step, through training's own step."""

import contextlib
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fastjax.training.optimizers import OptimizerConfig, make_optimizer
from fastjax.training.step import init_state, make_train_step

#: Keeps the gradients as its state and changes nothing.
RECORDER = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda grads, state, params=None: (jax.tree.map(jnp.zeros_like, grads), grads),
)

#: Keeps them and passes them on.
RECORDED = optax.GradientTransformation(RECORDER.init, lambda grads, state, params=None: (grads, grads))


@functools.lru_cache(maxsize=64)
def recording_step(graphdef, trainable_filter, **options):
    """A step that changes nothing and has the gradients as its optimizer's state."""
    return make_train_step(graphdef, RECORDER, trainable_filter, **options)


def gradients(model, batch, *, key=0, **options):
    """(metrics, gradients) of a batch as numpy trees; batches of one shape share one compilation."""
    step = recording_step(model.graphdef, model.trainable_filter, **options)
    state, metrics = step(init_state(model.trainable, RECORDER, jax.random.key(key)), model.frozen, batch)
    return jax.device_get(metrics), jax.device_get(state.opt_state)


def adam_step(model):
    """A step that does not donate, with AdamW at 0.01 without weight decay."""
    return _adam_step(model.graphdef, model.trainable_filter)


@functools.lru_cache(maxsize=64)
def _adam_step(graphdef, trainable_filter):
    return make_train_step(graphdef, optax.adamw(1e-2, weight_decay=0.0), trainable_filter, donate=False)


#: Adam divides by the gradient's size: with its usual epsilon, rounding decides the sign of steps along a zero.
ON_MESHES = OptimizerConfig(learning_rate=1e-2, max_grad_norm=0.5, adam_epsilon=1e-3)


def trained(model, batch, count=2, **options):
    """The metrics of steps with one batch, and the trained arrays after them."""
    optimizer = make_optimizer(ON_MESHES, 3)
    step = make_train_step(model.graphdef, optimizer, model.trainable_filter, **options)
    state, seen = init_state(model.trainable, optimizer, jax.random.key(1)), []
    for _ in range(count):
        state, metrics = step(state, model.frozen, batch)
        seen.append(jax.device_get(metrics))
    return seen, jax.device_get(state.trainable)


def assert_trained_alike(found, expected):
    """By `trained`, on several devices and on one: float32 sums in another order."""
    for many, one in zip(found[0], expected[0], strict=True):
        np.testing.assert_allclose(many["loss"], one["loss"], rtol=1e-6)
        np.testing.assert_allclose(many["grad_norm"], one["grad_norm"], rtol=1e-5)
        assert many["num_targets"] == one["num_targets"] and many["num_correct"] == one["num_correct"]
    assert_close(found[1], expected[1], 1e-5)


@contextlib.contextmanager
def compilations():
    """JAX's messages on compilations in the context."""
    found = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage()) if "Compiling" in record.msg else None
    logger = logging.getLogger("jax")
    logger.addHandler(handler)
    try:
        with jax.log_compiles():
            yield found
    finally:
        logger.removeHandler(handler)


def named(tree):
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def assert_close(found, expected, tolerance):
    """Every leaf, within `tolerance` of its largest element."""
    found, expected = named(found), named(expected)
    assert found.keys() == expected.keys()
    for name, leaf in expected.items():
        leaf = np.asarray(leaf, np.float64)
        bound = tolerance * np.abs(leaf).max()
        np.testing.assert_allclose(np.asarray(found[name], np.float64), leaf, rtol=0, atol=bound, err_msg=name)


def assert_same(found, expected):
    """Bit for bit."""
    found, expected = named(found), named(expected)
    assert found.keys() == expected.keys()
    for name, leaf in expected.items():
        assert np.asarray(found[name]).tobytes() == np.asarray(leaf).tobytes(), name
