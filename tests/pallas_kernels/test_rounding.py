"""Quotients as IEEE 754 rounds them, from what a device may say that they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rounding import nearest_quotient, quotient


def pairs(count=200_000):
    """Dividends, divisors and quotients of many sizes; some are whole numbers, or ties of codes, or almost."""
    rng = np.random.default_rng()
    x = rng.standard_normal(count) * 2.0 ** rng.integers(-60, 60, count)
    divisor = rng.standard_normal(count) * 2.0 ** rng.integers(-60, 30, count)
    x[:1000] = (divisor[:1000].astype(np.float32) * rng.integers(-1000, 1000, 1000)).astype(np.float32)
    divisor[1000:3000] = np.abs(x[1000:3000].astype(np.float32)) / np.float32(7.5)
    divisor[3000:5000] = x[3000:5000]
    x, divisor = x.astype(np.float32), divisor.astype(np.float32)
    with np.errstate(over="ignore"):
        return x, divisor, x / divisor


@pytest.mark.exhaustive("-2", "2")
@pytest.mark.parametrize("error", [-2, -1, 0, 1, 2])
def test_the_nearest_from_a_number_up_to_two_places_off(error):
    x, divisor, exact = pairs()
    near = np.where(exact == 0, exact, (exact.view(np.int32) + np.int32(error)).view(np.float32))
    found = np.asarray(jax.jit(lambda near: nearest_quotient(x, divisor, nearest_quotient(x, divisor, near)))(near))
    inside = (
        (np.abs(exact) > 2.0**-69) & (np.abs(exact) < 2.0**99) & (np.abs(x) > 2.0**-70) & (np.abs(divisor) > 2.0**-70)
    )
    np.testing.assert_array_equal(found[inside], exact[inside])
    assert inside.mean() > 0.8


def test_one_divisor_is_no_reciprocal_and_what_is_not_finite_stays():
    x, *_ = pairs()
    np.testing.assert_array_equal(jax.jit(lambda x: quotient(x, 3.0))(x), x / np.float32(3))
    hostile = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 3e38, 2.0**-126, 3e38], np.float32)
    divisor = np.array([1.0, 1.0, 2.0, 2.0, 1.0, 0.0, 0.0, 0.5, 2.0, 3e38], np.float32)
    with np.errstate(all="ignore"):
        expected = np.divide(hostile, divisor)
    np.put(expected, 8, jnp.float32(2.0**-126) / 2.0)  # subnormal: as the device has it
    np.testing.assert_array_equal(jax.jit(quotient)(hostile, divisor), expected)


@pytest.mark.gpu
def test_on_a_card():
    x, divisor, exact = pairs()
    inside = (np.abs(exact) < 2.0**99) & (np.minimum(np.abs(exact), np.minimum(np.abs(x), np.abs(divisor))) > 2.0**-69)
    np.testing.assert_array_equal(np.asarray(jax.jit(quotient)(x, divisor))[inside], exact[inside])
