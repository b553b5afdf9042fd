"""float32 vectors as parts of 8 bits, and their outer products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.float8.scaled import Scaled, Thin, thin
from pallas_kernels.thin import DEPTH, parts, side_by_side


def vector(seed, size=512):
    """Numbers of either sign and very different magnitudes."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal(size) * np.exp2(rng.uniform(-40, 40, size)), jnp.float32)


def test_the_parts_add_up_to_the_bit():
    numbers = vector(0)
    found = parts(numbers)
    assert all(part.dtype == jnp.bfloat16 for part in found)
    np.testing.assert_array_equal(sum(np.asarray(part, np.float64) for part in found), np.asarray(numbers, np.float64))
    assert np.any(np.asarray(found[2])), "a case that needs all of them"


def test_what_is_infinite_is_so_once():
    first, *others = parts(jnp.asarray([jnp.inf, -jnp.inf, 1.5], jnp.float32))
    np.testing.assert_array_equal(np.asarray(first, np.float32), [np.inf, -np.inf, 1.5])
    assert not np.any(np.asarray(others))


def test_a_thin_matrix_has_its_columns_where_they_belong():
    one, two = (jnp.full(4, value, jnp.bfloat16) for value in (1, 2))
    found = np.asarray(side_by_side([one, two], 3), np.float32)
    assert found.shape == (4, DEPTH)
    np.testing.assert_array_equal(found, np.tile([0, 0, 0, 1, 2] + [0] * 11, (4, 1)))


@pytest.mark.parametrize("exact", [True, False])
def test_each_operand_has_its_own_outer_product(exact):
    """To the bit with powers of two, to float32's rounding with any scales of columns; plain arrays stay."""
    exponents = np.random.default_rng(1).integers(-30, 30, (2, 64))
    powers = list(jnp.asarray(np.ldexp(1.0, exponents), jnp.float32))
    columns = powers[::-1] if exact else [vector(3, 64), vector(4, 64)]
    product, plain = jnp.ones((64, 64), jnp.bfloat16), jnp.zeros((64, 2))
    given = [Scaled(product, powers[0], columns[0]), plain, Scaled(product, powers[1], columns[1])]
    rows, (first, same, second) = thin(given)
    assert same is plain and thin([plain]) == (None, [plain])
    for found, scaled in ((first, given[0]), (second, given[2])):
        assert isinstance(found, Thin) and found.product is product
        outer = jax.lax.dot_general(rows, found.columns, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        expected = np.outer(np.asarray(scaled.rows, np.float64), np.asarray(scaled.columns, np.float64))
        np.testing.assert_allclose(np.asarray(outer, np.float64), expected, rtol=0 if exact else 2**-22)
