"""The schedules against transformers' formulas, AdamW against its definition, and which leaves decay."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastjax.training.optimizers import OptimizerConfig, decays, learning_rates, make_optimizer


def transformers_factor(kind: str, step: int, warmup: int, total: int) -> float:
    """What get_{cosine,linear,constant}_schedule_with_warmup multiply the learning rate by."""
    if step < warmup:
        return step / max(1, warmup)
    progress = (step - warmup) / max(1, total - warmup)
    return {"cosine": 0.5 * (1 + math.cos(math.pi * progress)), "linear": 1 - progress, "constant": 1.0}[kind]


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
@pytest.mark.parametrize(("settings", "warmup"), [({}, 0), ({"warmup_steps": 7}, 7), ({"warmup_ratio": 0.1}, 4)])
def test_schedule_is_transformers(kind, settings, warmup):
    rates = learning_rates(OptimizerConfig(learning_rate=3e-4, lr_scheduler_type=kind, **settings), 31)
    expected = [3e-4 * transformers_factor(kind, step, warmup, 31) for step in range(31)]
    # Float32 cosine of an argument up to pi: one part in 1e6 of the peak.
    np.testing.assert_allclose(rates, expected, rtol=0, atol=3e-10)


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_schedule_is_transformers_own(kind):
    torch = pytest.importorskip("torch")
    from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

    make = {"cosine": get_cosine_schedule_with_warmup, "linear": get_linear_schedule_with_warmup}[kind]
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    scheduler = make(optimizer, 5, 40)
    expected = []
    for _ in range(40):
        expected.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    rates = learning_rates(OptimizerConfig(learning_rate=1e-3, lr_scheduler_type=kind, warmup_steps=5), 40)
    np.testing.assert_allclose(rates, expected, rtol=0, atol=1e-9)


def test_update_is_adamw():
    config = OptimizerConfig(
        learning_rate=0.01, warmup_steps=2, weight_decay=0.1, adam_beta1=0.8, adam_beta2=0.95, max_grad_norm=0.5
    )
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((4, 3))
    params = {"layers": {"q_proj": {"lora_A": jnp.asarray(weight, jnp.float32)}}}
    optimizer = make_optimizer(config, 10)
    state = optimizer.init(params)
    m = v = np.zeros_like(weight)
    for step, rate in enumerate(learning_rates(config, 10), start=1):
        gradient = rng.standard_normal((4, 3))
        updates, state = optimizer.update(
            {"layers": {"q_proj": {"lora_A": jnp.asarray(gradient, jnp.float32)}}}, state, params
        )
        params = jax.tree.map(lambda p, u: p + u, params, updates)
        gradient = gradient * min(1.0, 0.5 / np.linalg.norm(gradient))
        m = 0.8 * m + 0.2 * gradient
        v = 0.95 * v + 0.05 * gradient**2
        step_size = (m / (1 - 0.8**step)) / (np.sqrt(v / (1 - 0.95**step)) + config.adam_epsilon)
        weight = weight - float(rate) * (step_size + 0.1 * weight)
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


def test_moments_are_float32_and_updates_are_not():
    params = {"w": jnp.ones((2, 2), jnp.bfloat16)}
    optimizer = make_optimizer(OptimizerConfig(), 10)
    state = optimizer.init(params)
    updates, state = optimizer.update({"w": jnp.ones((2, 2), jnp.bfloat16)}, state, params)
    assert updates["w"].dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype("float32"), jnp.dtype("int32")}


def test_vectors_do_not_decay_even_when_stacked():
    stacked = jnp.ones((5, 4))
    tree = {
        "embed_tokens": stacked,
        "layers": [
            {
                "input_layernorm": {"weight": stacked},
                "q_proj": {"weight": stacked, "bias": stacked, "magnitude": stacked},
            }
        ],
        "norm": {"weight": jnp.ones(4)},
    }
    expected = {
        "embed_tokens": True,
        "layers": [
            {"input_layernorm": {"weight": False}, "q_proj": {"weight": True, "bias": False, "magnitude": False}}
        ],
        "norm": {"weight": False},
    }
    assert decays(tree) == expected
    optimizer = make_optimizer(OptimizerConfig(weight_decay=0.5), 10)
    zeros = jax.tree.map(jnp.zeros_like, tree)
    updates, _ = optimizer.update(zeros, optimizer.init(tree), tree)
    assert jax.tree.map(lambda u: bool(jnp.any(u != 0)), updates) == expected
