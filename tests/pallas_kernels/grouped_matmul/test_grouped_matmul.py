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
    low_rank = draw(32, 3), draw(6, 40, 3)
    return draw(20, 24), draw(6, 40, 24), draw(32, 40), jnp.asarray(rng.integers(0, 20, 32), jnp.int32), low_rank


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_values_and_gradients(arrays, sizes):
    x, w, dy, rows, (z, b) = arrays
    sizes = jnp.asarray(sizes, jnp.int32)
    chosen, a = rows[::-1], b[:, :24].swapaxes(1, 2)

    @jax.jit
    def found(sizes):
        y, back = jax.vjp(lambda x, w, *low: grouped_matmul(x, w, sizes, rows=rows, low_rank=low), x, w, z, b)
        dx = grouped_matmul_dx(dy, w, sizes, rows=chosen, low_rank=(z, a))
        return y, back(dy), dx, grouped_matmul_dw(dy, x, sizes, rows=rows)

    @jax.jit
    def expected(sizes):
        y, back = jax.vjp(lambda x, w, *low: reference.matmul(x, w, sizes, rows, low), x, w, z, b)
        return y, back(dy), reference.dx(dy, w, sizes, chosen, (z, a)), reference.dw(dy, x, sizes, rows)

    # float32 sums of 40 and 32 terms
    jax.tree.map(lambda *pair: np.testing.assert_allclose(*pair, atol=2e-5), found(sizes), expected(sizes))


def test_refusals(arrays):
    x, w, _, rows, (z, b) = arrays
    sizes = jnp.zeros(6, jnp.int32)
    with pytest.raises(ValueError, match=r"expected w \[X, N, K\] beside x"):
        grouped_matmul(x[:, :3], w, sizes)
    with pytest.raises(ValueError, match="one floating dtype, given float32, bfloat16"):
        grouped_matmul(x, w.astype(jnp.bfloat16), sizes)
    with pytest.raises(ValueError, match="expected 6 group_sizes"):
        grouped_matmul(x, w, sizes[1:])
    with pytest.raises(ValueError, match="expected rows of one axis in int32"):
        grouped_matmul(x, w, sizes, rows=rows.astype(jnp.uint32))
    with pytest.raises(
        ValueError, match=r"expected low_rank of \[32, R\] and, with R = 3, \(6, 40, 3\), given \(20, 3\)"
    ):
        grouped_matmul(x, w, sizes, rows=rows, low_rank=(z[:20], b))
    with pytest.raises(ValueError, match="expected dy of 32 rows in float32"):
        grouped_matmul_dw(x, x, sizes, rows=rows)
    with pytest.raises(NotImplementedError, match="grouped_matmul: .* compute capability 9.0, the target is cpu"):
        grouped_matmul(x, w, sizes, implementation="mosaic")
