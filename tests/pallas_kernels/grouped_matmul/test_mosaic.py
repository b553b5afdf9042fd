"""Hopper's kernels, interpreted, against sums in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import mosaic_sm90
from pallas_kernels.grouped_matmul.config import MatmulConfig
from tests.pallas_kernels.grouped_matmul import exact
from tests.support.interpreter import mosaic_interpreter

pytestmark = pytest.mark.newer_jax("the interpreter of jax 0.10 misplaces rows behind the end of an array")
TOLERANCE = {"bfloat16": 2**-8, "float16": 2**-11}  # one rounding to the dtype of a sum in float32, of the largest
SIZES = [130, 0, 65, 5]  # of 208 rows; the last eight are no group's
CONFIG = MatmulConfig(columns=128, cluster=1, stages=3)


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)
    shapes = {
        "x": (208, 128),
        "w": (4, 192, 128),
        "dy": (208, 192),
        "z": (208, 64),
        "b": (4, 192, 64),
        "a": (4, 64, 128),
    }
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def assert_close(found, expected, dtype):
    assert found.dtype == dtype and found.shape == expected.shape
    assert np.abs(np.asarray(found, np.float64) - expected).max() <= TOLERANCE[dtype] * np.abs(expected).max()


@pytest.mark.parametrize(
    "transposed, dtype", [(False, "bfloat16"), (True, "float16")], ids=["forward", "gradient in x"]
)
def test_matmul(arrays, transposed, dtype):
    """The forward pass with a low-rank product inside, the gradient without."""
    names = ("dy", "w", "z", "a") if transposed else ("x", "w", "z", "b")
    x, w, z, b = (jnp.asarray(arrays[name], dtype) for name in names)
    low_rank = None if transposed else (z, b)
    expected = (exact.dx if transposed else exact.matmul)(x, w, SIZES, low_rank=low_rank)
    options = {"transposed": transposed, "config": CONFIG, "cores": 2}
    sizes = jnp.asarray(SIZES, jnp.int32)
    with mosaic_interpreter() as interpret:
        found = mosaic_sm90.matmul_of_tiles(x, w, sizes, None, low_rank, interpret=interpret, **options)
    assert_close(found, expected, dtype)


def test_dw(arrays):
    x, dy = (jnp.asarray(arrays[name], "bfloat16") for name in ("x", "dy"))
    with mosaic_interpreter() as interpret:
        found = mosaic_sm90.dw_of_tiles(
            dy, x, jnp.asarray(SIZES, jnp.int32), dtype="bfloat16", config=CONFIG, cores=2, interpret=interpret
        )
    assert_close(found, exact.dw(dy, x, SIZES), "bfloat16")
