"""Hopper's kernels, interpreted, against sums in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.compat import JAX_VERSION
from pallas_kernels.grouped_matmul import mosaic_sm90
from pallas_kernels.grouped_matmul.config import MatmulConfig
from tests.support.interpreter import mosaic_interpreter

pytestmark = pytest.mark.skipif(
    JAX_VERSION < (0, 11), reason="the interpreter of jax 0.10 misplaces rows behind the end of an array"
)
TOLERANCE = {"bfloat16": 2**-8, "float16": 2**-11}  # one rounding to the dtype of a sum in float32, of the largest
SIZES = [130, 0, 65, 5]  # of 208 rows; the last eight are no group's
CONFIG = MatmulConfig(columns=128, cluster=1, stages=3)


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)
    shapes = {"x": (208, 128), "w": (4, 192, 128), "dy": (208, 192), "z": (208, 64), "b": (4, 192, 64)}
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def rounded(dtype, *arrays):
    """Arrays in a dtype, and the same values in float64."""
    given = [jnp.asarray(array, dtype) for array in arrays]
    return given, [np.asarray(array, np.float64) for array in given]


def products(x, w):
    """x_i wₓᵀ."""
    w = np.concatenate([w, np.zeros_like(w[:1])])
    return np.einsum("mk,mnk->mn", x, w[np.repeat(np.arange(5), [*SIZES, 8])])


def assert_close(found, expected, dtype):
    assert found.dtype == dtype and found.shape == expected.shape
    assert np.abs(np.asarray(found, np.float64) - expected).max() <= TOLERANCE[dtype] * np.abs(expected).max()


@pytest.mark.parametrize(
    "transposed, dtype", [(False, "bfloat16"), (True, "float16")], ids=["forward", "gradient in x"]
)
def test_matmul(arrays, transposed, dtype):
    """The forward pass with a low-rank product inside, the gradient without."""
    matrices = [arrays[name].swapaxes(1, 2) if transposed else arrays[name] for name in ("w", "b")]
    (x, w, z, b), exact = rounded(dtype, arrays["x"], matrices[0], arrays["z"], matrices[1])
    expected = products(exact[0], exact[1].swapaxes(1, 2) if transposed else exact[1])
    if not transposed:
        expected = expected + products(exact[2], exact[3])
    low_rank = None if transposed else (z, b)
    options = {"transposed": transposed, "config": CONFIG, "cores": 2}
    with mosaic_interpreter() as interpret:
        found = mosaic_sm90.matmul(x, w, jnp.asarray(SIZES, jnp.int32), None, low_rank, interpret=interpret, **options)
    assert_close(found, expected, dtype)


def test_dw(arrays):
    (x, dy), exact = rounded("bfloat16", arrays["x"], arrays["dy"])
    starts = np.cumsum([0, *SIZES])
    expected = [exact[1][i:j].T @ exact[0][i:j] for i, j in zip(starts, starts[1:], strict=False)]
    with mosaic_interpreter() as interpret:
        found = mosaic_sm90.dw(
            dy, x, jnp.asarray(SIZES, jnp.int32), dtype="bfloat16", config=CONFIG, cores=2, interpret=interpret
        )
    assert_close(found, np.stack(expected), "bfloat16")
