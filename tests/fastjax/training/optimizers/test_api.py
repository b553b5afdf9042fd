"""The whole optimizers: AdamW and Lion against their definitions, and what all of them share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastjax.training.optimizers import OptimizerConfig, make_optimizer, rates_by_step

NAMES = ["adamw", "adamw_16bit", "adamw_8bit", "adafactor", "lion", "muon"]


def reference_update(name, config, gradient, m, v, step):
    """One direction by the published formulas, in float64, and the new moments."""
    b1, b2 = config.adam_beta1, config.adam_beta2
    if name == "lion":
        return np.sign(b1 * m + (1 - b1) * gradient), b2 * m + (1 - b2) * gradient, v
    m, v = b1 * m + (1 - b1) * gradient, b2 * v + (1 - b2) * gradient**2
    return (m / (1 - b1**step)) / (np.sqrt(v / (1 - b2**step)) + config.adam_epsilon), m, v


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_update_is_the_published_one(name):
    config = OptimizerConfig(
        name=name,
        learning_rate=0.01,
        warmup_steps=2,
        weight_decay=0.1,
        adam_beta1=0.8,
        adam_beta2=0.95,
        max_grad_norm=0.5,
    )
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((4, 3))
    params = {"layers": {"q_proj": {"lora_A": jnp.asarray(weight, jnp.float32)}}}
    optimizer = make_optimizer(config, 10)
    state = optimizer.init(params)
    m = v = np.zeros_like(weight)
    for step, rate in enumerate(rates_by_step(config, 10)[:10], start=1):
        gradient = rng.standard_normal((4, 3))
        updates, state = optimizer.update(
            {"layers": {"q_proj": {"lora_A": jnp.asarray(gradient, jnp.float32)}}}, state, params
        )
        params = jax.tree.map(lambda p, u: p + u, params, updates)
        gradient = gradient * min(1.0, 0.5 / np.linalg.norm(gradient))
        direction, m, v = reference_update(name, config, gradient, m, v, step)
        weight = weight - float(rate) * (direction + 0.1 * weight)
    # Ten float32 updates of numbers near one.
    np.testing.assert_allclose(params["layers"]["q_proj"]["lora_A"], weight, rtol=0, atol=2e-6)


def test_zero_means_no_clipping():
    params = {"w": jnp.ones((2, 2))}
    huge = {"w": jnp.full((2, 2), 1e6)}
    for max_grad_norm, expected in [(0.0, 1e6), (1.0, 0.5)]:
        optimizer = make_optimizer(OptimizerConfig(max_grad_norm=max_grad_norm, adam_beta1=0.0), 10)
        _, state = optimizer.update(huge, optimizer.init(params), params)
        first_moment = jax.tree.leaves(state)[1]
        np.testing.assert_allclose(first_moment, expected, rtol=1e-5)


def some_tree(seed, dtype=np.float32):
    """Layers whose tensors are no multiple of 256 long, a vector, and a tensor of fewer than 4,096 elements."""
    rng = np.random.default_rng(seed)
    layer = {"q_proj": {"lora_A": (3, 70, 61), "lora_B": (3, 40, 7)}, "norm": {"weight": (3, 5000)}}
    shapes = {"layers": [[layer]], "embed_tokens": {"weight": (101, 48)}}
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.standard_normal(shape), dtype), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )


def several_steps(optimizer, params, state, seeds, transform=lambda tree: tree):
    update = jax.jit(optimizer.update)
    for seed in seeds:
        updates, state = update(transform(some_tree(seed)), state, params)
        params = jax.tree.map(jnp.add, params, updates)
    return params, state


@pytest.mark.parametrize("name", NAMES)
def test_updates_have_the_parameters_dtype_and_arithmetic_is_float32(name):
    params, gradient = some_tree(0, jnp.bfloat16), some_tree(1, jnp.bfloat16)
    optimizer = make_optimizer(OptimizerConfig(name=name), 10)
    state = optimizer.init(params)
    updates, new_state = jax.jit(optimizer.update)(gradient, state, params)
    assert {u.dtype for u in jax.tree.leaves(updates)} == {jnp.dtype("bfloat16")}
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(lambda x: (x.shape, x.dtype), new_state)
    wanted = {"float32", "int32"} | {"adamw_8bit": {"uint8"}, "adamw_16bit": {"bfloat16"}}.get(name, set())
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(state)} == wanted


def test_small_updates_of_bfloat16_are_lost():
    """As make_optimizer's docstring says: from 1 the next bfloat16 is 0.8% away, and Adam's first step is the rate."""
    for rate, moves in [(0.0035, False), (0.0045, True)]:
        config = OptimizerConfig(learning_rate=rate, lr_scheduler_type="constant")
        params = {"w": jnp.ones((2, 2), jnp.bfloat16)}
        optimizer = make_optimizer(config, 10)
        updates, _ = optimizer.update({"w": -params["w"]}, optimizer.init(params), params)
        np.testing.assert_allclose(updates["w"].astype(jnp.float32), rate, rtol=4e-3)  # rounded to bfloat16
        assert bool(jnp.all(params["w"] + updates["w"] > 1)) is moves


@pytest.mark.exhaustive("adamw_8bit")
@pytest.mark.parametrize("name", NAMES)
def test_state_is_arrays_and_goes_on_from_a_copy(name):
    """Through NumPy and back, and through a choice between two states, as a step that is not finite makes it."""
    optimizer = make_optimizer(OptimizerConfig(name=name, warmup_steps=3, weight_decay=0.1), 10)
    start = some_tree(0)
    params, state = several_steps(optimizer, start, optimizer.init(start), range(1, 4))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    copied = jax.tree.map(lambda x: jnp.asarray(np.array(x)), (params, state))
    fresh = (start, optimizer.init(start))
    chosen = jax.tree.map(lambda new, old: jnp.where(jnp.bool_(True), new, old), copied, fresh)
    ends = [several_steps(optimizer, *begin, range(4, 7)) for begin in ((params, state), chosen)]
    for one, other in zip(*(jax.tree.leaves(end) for end in ends), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    assert jax.jit(optimizer.update)._cache_size() == 1, "compiled more than once"


@pytest.mark.exhaustive("adamw_8bit", "adafactor")
@pytest.mark.parametrize("name", NAMES)
def test_stacked_layers_are_updated_like_separate_ones(name):
    """The embedding keeps its place; each layer becomes a run of its own, as with layer_loop: unroll."""

    def separate(tree):
        runs = [[jax.tree.map(lambda x, index=index: x[index], tree["layers"][0][0])] for index in range(3)]
        return {**tree, "layers": runs}

    config = OptimizerConfig(name=name, weight_decay=0.1, max_grad_norm=0.0)
    optimizer, start = make_optimizer(config, 10), some_tree(0)
    together, _ = several_steps(optimizer, start, optimizer.init(start), range(1, 5))
    apart, _ = several_steps(optimizer, separate(start), optimizer.init(separate(start)), range(1, 5), separate)
    for one, other in zip(jax.tree.leaves(separate(together)), jax.tree.leaves(apart), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-7)  # float32 sums in another order


def test_parameters_are_needed():
    params = {"w": jnp.ones((2, 2))}
    optimizer = make_optimizer(OptimizerConfig(), 10)
    with pytest.raises(ValueError, match="expected the parameters as third argument, got none"):
        optimizer.update(params, optimizer.init(params))
