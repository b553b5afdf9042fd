"""Muon against optax's, and which weights are AdamW's."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fastjax.training.optimizers import OptimizerConfig, make_optimizer
from fastjax.training.optimizers.muon import orthogonalized, scale_by_muon

SHAPES = {
    "embed_tokens": {"weight": (11, 6)},
    "layers": {
        0: {
            0: {
                "self_attn": {"q": {"weight": (3, 6, 9), "adapters": {"lora_A": (3, 2, 9), "lora_B": (3, 6, 2)}}},
                "mlp": {"down": {"weight": (3, 2, 7, 5), "bias": (3, 7)}},
                "input_layernorm": {"weight": (3, 6)},
            }
        }
    },
    "norm": {"weight": (6,)},
    "lm_head": {"weight": (11, 6), "adapters": {"lora_A": (2, 6)}},
}
STEPS = 4


def tree(seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.standard_normal(shape), jnp.float32),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def matrices(found):
    """The leaves that are Muon's, each with its axes over layers and experts flattened."""
    layer = found["layers"][0][0]
    inside = layer["self_attn"]["q"]
    listed = [inside["weight"], *inside["adapters"].values(), layer["mlp"]["down"]["weight"]]
    listed.append(found["lm_head"]["adapters"]["lora_A"])
    return [matrix for leaf in listed for matrix in leaf.reshape(-1, *leaf.shape[-2:])]


def others(found):
    layer = found["layers"][0][0]
    listed = [found[name]["weight"] for name in ("embed_tokens", "norm", "lm_head")]
    return [*listed, layer["mlp"]["down"]["bias"], layer["input_layernorm"]["weight"]]


def test_directions_are_optaxs():
    ours = scale_by_muon(0.9, 0.8, 0.95, 1e-6)
    muon = optax.contrib.muon(1.0, beta=0.9, consistent_rms=0.2)
    adam = optax.scale_by_adam(0.8, 0.95, 1e-6)
    update, states = jax.jit(ours.update), (muon.init(matrices(tree(0))), adam.init(others(tree(0))))
    state, theirs = ours.init(tree(0)), jax.jit(muon.update)
    for step in range(STEPS):
        directions, state = update(tree(step), state)
        with jax.numpy_dtype_promotion("standard"):
            expected, muons = theirs(matrices(tree(step)), states[0], matrices(tree(0)))
            rest, adams = adam.update(others(tree(step)), states[1])
        states = (muons, adams)
        # Five float32 iterations enlarge a rounding of the momentum by up to 3.4 each, of numbers up to 0.6.
        for one, other in zip(matrices(directions), expected, strict=True):
            np.testing.assert_allclose(one, -other, rtol=0, atol=3e-5)
        for one, other in zip(others(directions), rest, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_singular_values_are_about_one_and_updates_have_adamws_size():
    rng = np.random.default_rng(0)
    for shape in ((64, 64), (48, 160), (160, 48)):
        found = np.linalg.svd(np.asarray(orthogonalized(jnp.asarray(rng.standard_normal(shape), jnp.float32))))[1]
        assert 0.5 < found.min() <= found.max() < 1.5  # as of the published coefficients
        params = {"w": jnp.zeros(shape)}
        config = OptimizerConfig(name="muon", learning_rate=1.0, lr_scheduler_type="constant", max_grad_norm=0.0)
        optimizer = make_optimizer(config, 10)
        updates, _ = optimizer.update({"w": rng.standard_normal(shape)}, optimizer.init(params), params)
        assert 0.16 < np.sqrt(np.mean(np.square(updates["w"]))) < 0.24


def test_no_gradient_is_no_update():
    params = {"layers": {0: {0: {"q": {"adapters": {"lora_A": jnp.ones((3, 2, 9))}}}}}}
    optimizer = make_optimizer(OptimizerConfig(name="muon", lr_scheduler_type="constant"), 10)
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    assert not np.any(jax.tree.leaves(updates)[0])
