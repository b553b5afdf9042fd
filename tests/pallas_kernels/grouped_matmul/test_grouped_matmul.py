"""Products over groups against the plain ones, in value and gradient; refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import grouped_matmul, grouped_matmul_dw, grouped_matmul_dx, reference

SIZES = {
    "uneven, two empty": [5, 0, 17, 3, 0, 7],
    "one takes all": [0, 0, 32, 0, 0, 0],
    "rows past the last group": [4, 4, 0, 1, 2, 3],
}


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    return draw(20, 24), draw(6, 40, 24), draw(32, 40), jnp.asarray(rng.integers(0, 20, 32), jnp.int32)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_values_and_gradients(arrays, sizes):
    x, w, dy, rows = arrays
    sizes = jnp.asarray(sizes, jnp.int32)

    @jax.jit
    def found(x, w, dy, sizes):
        y, back = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, rows=rows), x, w)
        return y, *back(dy), grouped_matmul_dx(dy, w, sizes), grouped_matmul_dw(dy, x, sizes, rows=rows)

    @jax.jit
    def expected(x, w, dy, sizes):
        y, back = jax.vjp(lambda x, w: reference.matmul(x, w, sizes, rows), x, w)
        return y, *back(dy), reference.dx(dy, w, sizes), reference.dw(dy, x, sizes, rows)

    for one, other in zip(found(x, w, dy, sizes), expected(x, w, dy, sizes), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)  # float32 sums of 40 and 32 terms


def test_refusals(arrays):
    x, w, _, rows = arrays
    sizes = jnp.zeros(6, jnp.int32)
    with pytest.raises(ValueError, match=r"expected w \[X, N, K\] beside x"):
        grouped_matmul(x[:, :3], w, sizes)
    with pytest.raises(ValueError, match="one floating dtype, given float32 and bfloat16"):
        grouped_matmul(x, w.astype(jnp.bfloat16), sizes)
    with pytest.raises(ValueError, match="expected 6 group_sizes"):
        grouped_matmul(x, w, sizes[1:])
    with pytest.raises(ValueError, match="expected rows of one axis in int32"):
        grouped_matmul(x, w, sizes, rows=rows.astype(jnp.uint32))
    with pytest.raises(ValueError, match="expected dy of 32 rows in float32"):
        grouped_matmul_dw(x, x, sizes, rows=rows)
    with pytest.raises(ValueError, match="implementation must be None or one of"):
        grouped_matmul(x, w, sizes, implementation="cuda")
