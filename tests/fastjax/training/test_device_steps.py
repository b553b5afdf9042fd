"""The bounds by which tests on a card judge: they let rounding through and nothing else."""

import dataclasses

import numpy as np
import pytest

from tests.support import device_steps, steps, tiny

#: Half the distance of float16's smallest numbers, of which some of bfloat16's are no multiples.
FLOAT16_STEP = 2.0**-25
DTYPES = ["bfloat16", "float16", "float32"]


def rounded(exact, dtype, seed=0):
    """An outcome with errors of about one rounding in each element, as a step in that dtype has after a few of them."""
    rng, unit = np.random.default_rng(seed), device_steps.UNIT[dtype]
    leaves = {
        name: leaf * (1 + 5 * unit * rng.standard_normal(leaf.shape)) for name, leaf in sorted(exact.leaves.items())
    }
    return dataclasses.replace(exact, loss=exact.loss * (1 + unit), leaves=leaves)


@pytest.fixture
def exact():
    rng = np.random.default_rng(0)
    names = [f"layers.{layer}.{name}.lora_{half}" for layer in (0, 1) for name in ("q", "down") for half in "AB"]
    return device_steps.Outcome(5.0, 100, {name: rng.standard_normal((16, 20)) for name in names}, frozenset())


def bounds(exact, dtype):
    return device_steps.allowed(device_steps.errors(rounded(exact, "bfloat16"), exact), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_is_within_the_bounds(exact, dtype, capsys):
    device_steps.assert_within(rounded(exact, dtype, seed=1), exact, bounds(exact, dtype), "rounded")
    assert capsys.readouterr().out.startswith("rounded: loss off by ")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", [lambda leaf: 1.05 * leaf, np.zeros_like, np.negative, lambda leaf: leaf * np.nan])
def test_a_wrong_leaf_is_named(exact, dtype, fault):
    name = "layers.1.down.lora_B"
    found = rounded(exact, dtype, seed=1)
    found = dataclasses.replace(found, leaves={**found.leaves, name: fault(found.leaves[name])})
    with pytest.raises(AssertionError, match=r"^wrong: \{'layers\.1\.down\.lora_B': '[^']*'\}$"):
        device_steps.assert_within(found, exact, bounds(exact, dtype), "wrong")


def test_a_wrong_loss_is_named(exact):
    with pytest.raises(AssertionError, match="^wrong: {'loss': "):
        found = dataclasses.replace(exact, loss=1.01 * exact.loss)
        device_steps.assert_within(found, exact, bounds(exact, "bfloat16"), "wrong")


def test_a_model_that_rounding_alone_changes_is_refused(exact):
    with pytest.raises(AssertionError, match="it proves nothing"):
        device_steps.allowed(dict.fromkeys(["loss", *exact.leaves], 0.5), "bfloat16")


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_model_in_another_dtype_is_what_loading_it_in_that_dtype_gives(dtype):
    folder = tiny.shared_folder()
    model, direct = (tiny.adapted(tiny.model(folder, None, dtype=name)) for name in ("bfloat16", dtype))
    found = device_steps.in_dtype(model, dtype)
    assert found.graphdef == direct.graphdef and found.precision == direct.precision
    ours, theirs = steps.named(found.frozen), steps.named(direct.frozen)
    assert ours.keys() == theirs.keys()
    for name, leaf in ours.items():
        assert leaf.dtype == theirs[name].dtype, name
        held = steps.named(model.frozen)[name]
        wide = (np.asarray(array.astype("float32")) for array in (leaf, held))
        np.testing.assert_allclose(*wide, rtol=0, atol=FLOAT16_STEP if dtype == "float16" else 0, err_msg=name)
