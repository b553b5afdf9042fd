"""The schedules against transformers' formulas, and against transformers itself."""

import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fastjax.errors import ConfigError
from fastjax.training.optimizers import OptimizerConfig, make_optimizer, rates_by_step
from fastjax.training.optimizers.schedules import rate_in_state

WARMUPS = [({}, 0), ({"warmup_steps": 7}, 7), ({"warmup_ratio": 0.1}, 4)]
TOTAL = 31


def transformers_factor(kind: str, step: int, warmup: int, lowest: float, decay: int) -> float:
    """The factor of the learning rate in transformers' get_*_schedule_with_warmup and get_wsd_schedule."""
    if step < warmup:
        factor = step / max(1, warmup)
        return lowest + (1 - lowest) * factor if kind == "wsd" else factor
    if kind == "constant":
        return 1.0
    progress = (step - warmup) / max(1, TOTAL - warmup)
    if kind == "wsd":
        progress = max(0.0, (step - (TOTAL - decay)) / decay)
    factor = 0.5 * (1 + math.cos(math.pi * progress)) if kind == "cosine" else 1 - progress
    return lowest + (1 - lowest) * factor


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "wsd"])
@pytest.mark.parametrize(("settings", "warmup"), WARMUPS)
@pytest.mark.parametrize("lowest", [0.0, 0.2])
def test_schedule_is_transformers(kind, settings, warmup, lowest):
    config = OptimizerConfig(
        learning_rate=3e-4, lr_scheduler_type=kind, min_lr_ratio=lowest, decay_ratio=0.25, **settings
    )
    rates = rates_by_step(config, TOTAL)[:TOTAL]
    expected = [3e-4 * transformers_factor(kind, step, warmup, lowest, 8) for step in range(TOTAL)]
    # Float32 cosine of an argument up to pi: one part in 1e6 of the peak.
    np.testing.assert_allclose(rates, expected, rtol=0, atol=3e-10)


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "cosine with a floor", "wsd"])
def test_schedule_is_transformers_own(kind):
    torch = pytest.importorskip("torch")
    import transformers

    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    settings = {"lr_scheduler_type": kind.split()[0], "warmup_steps": 5}
    if kind == "wsd":
        settings |= {"min_lr_ratio": 0.3, "decay_ratio": 0.4}
        scheduler = transformers.get_wsd_schedule(
            optimizer, 5, 16, num_training_steps=40, decay_type="linear", min_lr_ratio=0.3
        )
    elif kind == "cosine with a floor":
        settings |= {"min_lr_ratio": 0.3}
        scheduler = transformers.get_cosine_with_min_lr_schedule_with_warmup(optimizer, 5, 40, min_lr_rate=0.3)
    elif kind == "constant":
        scheduler = transformers.get_constant_schedule_with_warmup(optimizer, 5)
    else:
        make = getattr(transformers, f"get_{kind}_schedule_with_warmup")
        scheduler = make(optimizer, 5, 40)
    expected = []
    for _ in range(40):
        expected.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    rates = rates_by_step(OptimizerConfig(learning_rate=1e-3, **settings), 40)[:40]
    np.testing.assert_allclose(rates, expected, rtol=0, atol=1e-9)  # float32 cosine, as above


def test_a_decay_that_would_begin_in_the_warmup_begins_after_it():
    config = OptimizerConfig(learning_rate=1.0, lr_scheduler_type="wsd", warmup_steps=6, decay_ratio=0.8)
    rates = rates_by_step(config, 10)[:10]
    np.testing.assert_allclose(rates, [0, 1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1, 0.75, 0.5, 0.25], rtol=1e-6)


def test_phases_of_wsd_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match=r"warmup_ratio \(0.6\) and optimizer.decay_ratio \(0.5\)"):
        OptimizerConfig(lr_scheduler_type="wsd", warmup_ratio=0.6, decay_ratio=0.5)
    OptimizerConfig(lr_scheduler_type="cosine", warmup_ratio=0.6, decay_ratio=0.5)


def test_the_rate_of_an_update_is_read_from_the_optimizers_state():
    config, params = OptimizerConfig(learning_rate=1e-3, warmup_steps=4), {"w": jnp.zeros(3)}
    ours = make_optimizer(config, 10)
    for optimizer in (ours, optax.chain(optax.identity(), ours)):
        assert rate_in_state(optimizer.init(params), jnp.int32(2)) == rates_by_step(config, 10)[2] > 0
    assert rate_in_state(optax.adamw(1e-3).init(params), jnp.int32(2)) is None
