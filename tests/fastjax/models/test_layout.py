"""The arrangement of the layers: every layer once, equal ones stacked, and there and back without a change."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastjax.execution.stacks import arrange, layer_of, plan_layers, rearrange
from fastjax.models.layout import LayerStack

signatures = st.lists(st.sampled_from("abc"), min_size=1, max_size=26)


@given(signatures, st.sampled_from(["scan", "unroll"]))
def test_every_layer_is_in_one_run_and_what_is_stacked_is_equal(kinds, layer_loop):
    plan = plan_layers(kinds, scans=layer_loop == "scan")
    covered = [
        run.start + repeat * run.period + position
        for run in plan
        for repeat in range(run.count)
        for position in range(run.period)
    ]
    assert covered == list(range(len(kinds)))
    for run in plan:
        assert run.count > 1 or run.period == 1
        for position in range(run.period):
            assert len({kinds[run.start + position + n * run.period] for n in range(run.count)}) == 1
    if layer_loop == "unroll":
        assert all(run.count == 1 for run in plan)


@given(st.lists(st.sampled_from("ab"), min_size=1, max_size=8), st.integers(2, 6))
def test_a_repeated_pattern_is_one_run(unit, count):
    plan = plan_layers(unit * count, scans=True)
    assert sum(run.period for run in plan) <= len(unit)


@pytest.mark.parametrize(
    ("kinds", "plan"),
    [
        ("aaaa", [LayerStack(0, 1, 4)]),
        ("aaaaab" * 4 + "aa", [LayerStack(0, 6, 4), LayerStack(24, 1, 2)]),  # 26 layers with a period of 6
        ("baaaa", [LayerStack(0, 1, 1), LayerStack(1, 1, 4)]),
        ("abc", [LayerStack(0, 1, 1), LayerStack(1, 1, 1), LayerStack(2, 1, 1)]),
        ("a", [LayerStack(0, 1, 1)]),
    ],
)
def test_known_plans(kinds, plan):
    assert list(plan_layers(kinds, scans=True)) == plan


@settings(deadline=None, max_examples=40)
@given(signatures)
def test_arranging_keeps_every_layer(kinds):
    """Also from one arrangement into another, and with shapes that only equal layers share."""
    shapes = {"a": (2,), "b": (3,), "c": (2, 2)}
    numbers = itertools.count()
    layers = [{"weight": np.full(shapes[kind], next(numbers), np.float32)} for kind in kinds]
    scan, unroll = plan_layers(kinds, scans=True), plan_layers(kinds, scans=False)
    runs = arrange(layers, scan)
    for index, layer in enumerate(layers):
        assert np.array_equal(layer_of(runs, scan, index)["weight"], layer["weight"])
    back = rearrange(rearrange(runs, scan, unroll), unroll, scan)
    assert jax.tree.structure(back) == jax.tree.structure(runs)
    assert all(jnp.array_equal(a, b) for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(runs), strict=True))


def test_there_is_no_layer_beyond_the_last():
    with pytest.raises(IndexError, match="layer 4"):
        layer_of([[{}]], [LayerStack(0, 1, 4)], 4)
