"""The Triton kernels: interpreted, against sums in float64; compiled for absent cards; who is chosen."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import ZEROS_BEHIND, grouped_matmul, grouped_matmul_dw, grouped_matmul_dx, triton
from pallas_kernels.grouped_matmul.config import TritonConfig
from tests.pallas_kernels.grouped_matmul import exact
from tests.support import resources
from tests.support.aot import AOT, needs_cuda_plugin

TOLERANCE = {"bfloat16": 2**-8, "float16": 2**-11}  # one rounding to the dtype of a sum in float32, of the largest
SIZES = {
    "uneven": [33, 0, 17, 6, 8, 5],
    "one takes all": [0, 0, 0, 70, 0, 0],
    "one row each": [1, 1, 1, 1, 1, 1],
    "rows of no group": [20, 1, 0, 0, 30, 7],
}
M, T, R = 71, 20, 5
CONFIG = TritonConfig(rows=32, columns=32, terms=32)


@pytest.fixture(scope="module", params=[("bfloat16", 40, 72), ("float16", 64, 32)], ids=["padded", "whole tiles"])
def arrays(request):
    dtype, n, k = request.param
    rng = np.random.default_rng(0)
    shapes = {
        "x": (T, k),
        "full": (M, k),
        "w": (6, n, k),
        "dy": (M, n),
        "z": (M, R),
        "b": (6, n, R),
        "a": (6, R, k),
    }
    drawn = {name: jnp.asarray(rng.standard_normal(shape), dtype) for name, shape in shapes.items()}
    return {**drawn, "rows": jnp.asarray(rng.integers(0, T, M), jnp.int32)}


def assert_close(found, expected, dtype):
    assert found.dtype == dtype and found.shape == expected.shape
    assert np.abs(np.asarray(found, np.float64) - expected).max() <= TOLERANCE[dtype.name] * np.abs(expected).max()


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_interpreted(arrays, sizes):
    x, full, w, dy, z, b, a, rows = arrays.values()
    options = {"config": CONFIG, "interpret": True}
    known = sum(sizes) + ZEROS_BEHIND
    sizes = jnp.asarray(sizes, jnp.int32)
    for kernel, plain, operands in (
        (triton.matmul, exact.matmul, (x, w, sizes, rows, (z, b))),
        (triton.matmul, exact.matmul, (full, w, sizes, None, None)),
        (triton.dx, exact.dx, (dy, w, sizes, None, (z, a))),
    ):
        assert_close(kernel(*operands, **options)[:known], plain(*operands)[:known], x.dtype)
    assert_close(triton.dw(dy, x, sizes, rows, x.dtype, **options), exact.dw(dy, x, sizes, rows), x.dtype)
    # float32 sums of products that are exact there
    found = triton.dw(dy, full, sizes, None, jnp.float32, **options)
    np.testing.assert_allclose(found, exact.dw(dy, full, sizes), rtol=1e-5, atol=1e-5)


def test_tiles_of_thin_products(arrays):
    """By their own choice of block sizes."""
    _, full, _, _, z, _, a, _ = arrays.values()
    sizes = jnp.asarray(SIZES["uneven"], jnp.int32)
    found = triton.matmul(full, a, sizes, None, None, interpret=True)
    assert_close(found, exact.matmul(full, a, sizes), full.dtype)
    found = triton.dw(z, full, sizes, None, full.dtype, interpret=True)
    assert_close(found, exact.dw(z, full, sizes), full.dtype)


@pytest.mark.aot
@needs_cuda_plugin
@pytest.mark.exhaustive("a100-80-many rows")
@pytest.mark.parametrize("few", [False, True], ids=["many rows", "few rows"])
@pytest.mark.parametrize("card", ["a100-80", "4090"])
def test_nothing_spills(card, few, tmp_path):
    """All three products, as chosen by the card, with gathered rows and a low-rank product, and thin ones."""
    aot = AOT(card)
    x, n, k, t, m = (128, 1536, 2048, 512, 2048) if few else (64, 1536, 2048, 8192, 65536)
    of = functools.partial(aot.spec, dtype=jnp.bfloat16)

    def products(x, dy, w, sizes, rows, z, b, a):
        y = grouped_matmul(x, w, sizes, rows=rows, low_rank=(z, b))
        dx = grouped_matmul_dx(dy, w, sizes, low_rank=(z, a))
        dw = grouped_matmul_dw(dy, x, sizes, rows=rows, dtype=jnp.float32)
        thin = grouped_matmul(x, a, sizes, rows=rows)
        return y, dx, dw, thin, grouped_matmul_dw(dy, z, sizes), grouped_matmul_dw(z, x, sizes, rows=rows)

    specs = of((t, k)), of((m, n)), of((x, n, k)), aot.spec((x,), jnp.int32), aot.spec((m,), jnp.int32)
    used = resources.of_triton(aot, products, *specs, of((m, 16)), of((x, n, 16)), of((x, 16, k)), folder=tmp_path)
    if used is not None:
        assert used.spill_bytes == used.stack_bytes == 0
