"""The end of a step: what is kept where a number is not finite, and one kernel a weight in the compiled step."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fastjax.training.commit import finite_or_kept
from fastjax.training.optimizers import OptimizerConfig, make_optimizer
from tests.support.aot import AOT, needs_cuda_plugin


@pytest.mark.parametrize("finite", [True, False])
def test_all_of_the_new_state_or_all_of_the_old(finite):
    """Small arrays and large ones, alone and with what the optimizer holds of them."""
    sizes = {"a": {"w": (1024, 1024)}, "b": {"w": (1024, 1025)}, "c": {"w": (3,)}}
    old = [jax.tree.map(lambda shape: jnp.full(shape, 1.0), sizes, is_leaf=lambda s: isinstance(s, tuple))] * 2
    new = jax.tree.map(lambda array: array + 1, old)
    found = jax.jit(finite_or_kept)(jnp.asarray(finite), (jnp.int32(8), new), (jnp.int32(7), old))
    assert found[0] == 7 + finite
    assert jax.tree.structure(found[1]) == jax.tree.structure(new)
    for array, shape in zip(jax.tree.leaves(found[1]), jax.tree.leaves(old), strict=True):
        assert array.shape == shape.shape and np.all(np.asarray(array) == 1 + finite)


@pytest.mark.aot
@needs_cuda_plugin
def test_each_weight_is_updated_by_one_kernel_in_its_place():
    layers, shape = 24, (2048, 8192)
    optimizer = make_optimizer(OptimizerConfig(name="adamw_16bit", learning_rate=1e-4), 10)

    def step(params, state, grads, finite):
        with jax.numpy_dtype_promotion("standard"):
            updates, new = optimizer.update(grads, state, params)
            return finite_or_kept(finite, (optax.apply_updates(params, updates), new), (params, state))

    aot = AOT()
    params = {f"layer{n}": aot.spec(shape, jnp.bfloat16) for n in range(layers)}
    state = jax.tree.map(lambda leaf: aot.spec(leaf.shape, leaf.dtype), jax.eval_shape(optimizer.init, params))
    donated = jax.jit(step, donate_argnums=(0, 1))
    program = aot.compile(donated, params, state, params, aot.spec((), jnp.bool_))
    text = program.as_text()
    weight = rf"bf16\[{shape[0]},{shape[1]}\]\S*"
    entry = text[text.index("\nENTRY") :]
    assert len(re.findall(rf"= \({weight}, {weight}, {weight}\) fusion\(", entry)) == layers
    assert not re.findall(rf"= {weight} (?:copy|fusion)\(", entry)
    assert program.memory_analysis().temp_size_in_bytes < 2**20
