"""Moments in bfloat16: rounded to one of two neighbours, right in the mean, and so never standing still."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastjax.training.optimizers import OptimizerConfig, make_optimizer
from fastjax.training.optimizers.adam import round_stochastically, scale_by_adam


def test_numbers_go_to_a_neighbour_and_keep_their_mean():
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(64, 32)) * 10.0 ** rng.integers(-30, 30, (64, 32))).astype(np.float32)
    x[0, :4] = 0.0, -0.0, 1.0, -(2.0**-130)
    pair = jnp.asarray(x), jnp.asarray(x[::-1].copy())
    found = jax.vmap(lambda draw: round_stochastically(pair, draw))(jnp.arange(4096))
    both = [np.asarray(draws, np.float32) for draws in found]
    both[1] = both[1][:, ::-1]
    ups = [_ups(draws, x) for draws in both]
    assert abs(np.mean(ups[0][:, ::-1] * ups[1])) < 0.01, "the arrays of a pair know nothing of each other"


def _ups(draws, x):
    """Which numbers are rounded up, less their chance and by its spread; each is checked on the way."""
    down = (x.view(np.uint32) & 0xFFFF0000).view(np.float32)
    up = ((x.view(np.uint32) & 0xFFFF0000) + np.where(down == x, 0, 0x10000).astype(np.uint32)).view(np.float32)
    assert np.all((draws == down) | (draws == up)) and np.all(draws[:, 0, :2] == 0)
    chance = (x - down) / np.where(up == down, 1, up - down)
    found = np.mean(draws != down, axis=0)
    spread = np.sqrt(np.maximum(chance * (1 - chance), 1e-9) / 4096)
    assert np.all(np.abs(found - chance) < 6 * spread + 2**-16)
    # Two places, and two draws, are rounded up as if they knew nothing of each other.
    ups = (draws != down)[:, 1:, :] - chance[1:]
    ups /= np.maximum(np.sqrt(chance * (1 - chance)), 1e-3)[1:]
    assert abs(np.mean(ups[:, :, 1:] * ups[:, :, :-1])) < 0.01 and abs(np.mean(ups[1:] * ups[:-1])) < 0.01
    return ups


def test_a_second_moment_falls_as_in_32_bits():
    """Gradients of zero: it is 0.999 of itself after each step, which to the nearest it would never be."""
    rule = scale_by_adam(0.9, 0.999, 1e-8, bits=16)
    params = {"w": jnp.zeros((64, 128))}
    state = rule.init(params)
    assert state.nu["w"].dtype == jnp.bfloat16
    state = state._replace(nu={"w": jnp.ones((64, 128), jnp.bfloat16)}, count=jnp.int32(1))
    step = jax.jit(lambda state: rule.update(params, state)[1])
    for _ in range(700):
        state = step(state)
    assert np.mean(np.asarray(state.nu["w"], np.float64)) == pytest.approx(0.999**700, rel=5e-3)


def test_losses_are_those_of_32_bits():
    """Least squares in bfloat16 moments, the mean of 32 copies with noise of their own, goes as in float32 moments."""
    rng = np.random.default_rng(1)
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((256, 32), (16, 32)))
    y = jnp.tile(x @ w.T, (1, 32))

    def train(name):
        optimizer = make_optimizer(OptimizerConfig(name=name, learning_rate=0.05, lr_scheduler_type="linear"), 300)
        params = {"w": jnp.zeros((32 * 16, 32))}

        def step(carry, _):
            params, state = carry
            loss, gradient = jax.value_and_grad(lambda p: jnp.mean((x @ p["w"].T - y) ** 2))(params)
            updates, state = optimizer.update(gradient, state, params)
            return (jax.tree.map(jnp.add, params, updates), state), loss

        return np.asarray(jax.jit(lambda: jax.lax.scan(step, (params, optimizer.init(params)), None, 300)[1])())

    half, whole = train("adamw_16bit"), train("adamw")
    # One copy's loss is off by up to 4% where it is a ten thousandth of the first; their mean by a sixth of that.
    np.testing.assert_allclose(half[:100], whole[:100], rtol=0.01)
    assert half[-1] < 1e-3 * half[0] and whole[-1] < 1e-3 * whole[0]
