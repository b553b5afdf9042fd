"""Dynamic loss scaling: halved by an overflow, doubled after a window without one, within its bounds."""

import jax.numpy as jnp

from fastjax.training.loss_scale import LARGEST, LossScale


def run(scale, finite, window=3):
    for ok in finite:
        scale = scale.after(jnp.asarray(ok), window)
    return float(scale.scale), int(scale.good_steps), int(scale.skipped_steps)


def test_it_doubles_after_a_window_and_halves_after_an_overflow():
    start = LossScale.start(1024.0)
    assert run(start, [True, True]) == (1024.0, 2, 0)
    assert run(start, [True, True, True]) == (2048.0, 0, 0)
    assert run(start, [True, True, False]) == (512.0, 0, 1)
    assert run(start, [True, True, False, True, True, True]) == (1024.0, 0, 1)


def test_its_bounds():
    assert run(LossScale.start(4.0), [False] * 5) == (1.0, 0, 5)
    assert bool(LossScale.start(1.0).exhausted) and not bool(LossScale.start(2.0).exhausted)
    assert run(LossScale.start(LARGEST), [True] * 3) == (LARGEST, 0, 0)
