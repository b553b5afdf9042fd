"""Metrics and exact gradients of one train step, through training's own step."""

import contextlib
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax

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
