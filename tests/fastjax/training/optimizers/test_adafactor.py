"""Adafactor against transformers' and against its definition."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fastjax.training.optimizers import OptimizerConfig, make_optimizer, rates_by_step

CONFIG = OptimizerConfig(name="adafactor", learning_rate=2e-2, warmup_steps=2, weight_decay=0.1, max_grad_norm=0.0)
SHAPES = {"q_proj": {"lora_A": (4, 48), "lora_B": (64, 4), "bias": (64,)}, "norm": {"weight": (48,)}}
STEPS = 12


def tree(seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: rng.standard_normal(shape).astype(np.float32), SHAPES, is_leaf=lambda x: isinstance(x, tuple)
    )


def run(config, params, gradients):
    optimizer = make_optimizer(config, len(gradients))
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for gradient in gradients:
        updates, state = update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.torch
def test_steps_are_transformers():
    torch = pytest.importorskip("torch")
    from transformers.optimization import Adafactor

    gradients = [jax.tree.map(lambda g: 3 * g, tree(seed)) for seed in range(1, STEPS + 1)]
    gradients[4] = jax.tree.map(lambda g: 50 * g, gradients[4])  # the clipping has something to clip
    found = run(CONFIG, jax.tree.map(jnp.asarray, tree(0)), gradients)
    leaves, structure = jax.tree.flatten(tree(0))
    theirs = [torch.nn.Parameter(torch.from_numpy(leaf)) for leaf in leaves]
    # In the order of the leaves: norm.weight, q_proj.bias, lora_A, lora_B.
    groups = [{"params": theirs[:2], "weight_decay": 0.0}, {"params": theirs[2:], "weight_decay": 0.1}]
    optimizer = Adafactor(groups, lr=1.0, scale_parameter=False, relative_step=False, warmup_init=False)
    for rate, gradient in zip(rates_by_step(CONFIG, STEPS)[:STEPS], gradients, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = float(rate)
        for parameter, g in zip(theirs, jax.tree.leaves(gradient), strict=True):
            parameter.grad = torch.from_numpy(g)
        optimizer.step()
    expected = structure.unflatten([parameter.detach().numpy() for parameter in theirs])
    # Twelve float32 updates of at most 0.02.
    jax.tree.map(lambda ours, other: np.testing.assert_allclose(ours, other, rtol=0, atol=2e-6), found, expected)


def test_first_direction_of_a_matrix():
    """At step one the decay is zero, and a squared gradient of rank one is factored without loss: signs remain."""
    rng = np.random.default_rng(0)
    gradient = np.outer(rng.uniform(0.1, 3, 6), rng.uniform(0.1, 3, 5)) * rng.choice([-1, 1], (6, 5))
    config = OptimizerConfig(name="adafactor", learning_rate=1.0, lr_scheduler_type="constant")
    params = {"w": jnp.zeros((6, 5))}
    found = run(config, params, [{"w": jnp.asarray(gradient, jnp.float32)}])
    np.testing.assert_allclose(found["w"], -np.sign(gradient), rtol=1e-5)  # float32
