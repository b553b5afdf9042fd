"""The products on the card against sums in float64, with fresh inputs, and bit for bit again."""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import nf4
from pallas_kernels.grouped_matmul import (
    ZEROS_BEHIND,
    grouped_matmul,
    grouped_matmul_dw,
    grouped_matmul_dx,
    grouped_nf4_matmul,
    mosaic_sm90,
)
from pallas_kernels.grouped_matmul.config import MatmulConfig
from tests.pallas_kernels.grouped_matmul import exact

pytestmark = pytest.mark.gpu
TOLERANCE = {"bfloat16": 2**-8, "float16": 2**-11}  # one rounding to the dtype of a sum in float32, of the largest
SIZES = {
    "uneven": [130, 0, 257, 63, 64, 5],
    "one takes all": [0, 0, 0, 600, 0, 0],
    "one row each": [1, 1, 1, 1, 1, 1],
    "rows of no group": [100, 1, 0, 0, 300, 7],
    "large": [3000, 0, 1, 2500, 700, 999],
}


def draw(dtype, *shapes):
    rng = np.random.default_rng(time.time_ns())
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def assert_close(found, expected, dtype, name=""):
    assert found.dtype == jnp.dtype(dtype) and found.shape == expected.shape
    wrong = ~(np.abs(np.asarray(found, np.float64) - expected) <= TOLERANCE[dtype] * np.abs(expected).max())
    places = [sorted({int(index) for index in axis})[:8] for axis in np.nonzero(wrong)]
    assert not wrong.any(), f"{name}: {wrong.sum()} of {wrong.size} wrong, first along each axis: {places}"


@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
@pytest.mark.parametrize("n, k", [(328, 264), (512, 192), (24, 320), (41, 77)], ids=str)
def test_products(n, k, implementation):
    """Sizes of groups are values: those of as many rows have one program of each product.

    Of the rows past the last group the first are zeros, and no sum reads the others.
    """
    dtype = "float16" if n == 512 else "bfloat16"
    rng, tokens = np.random.default_rng(time.time_ns()), 300
    products = {
        function: jax.jit(functools.partial(function, implementation=implementation))
        for function in (grouped_matmul, grouped_matmul_dx, grouped_matmul_dw)
    }
    for title, sizes in SIZES.items():
        count = max(601, sum(sizes))
        known = min(count, sum(sizes) + ZEROS_BEHIND)
        x, full, w, dy, z, b, a = draw(
            dtype, (tokens, k), (count, k), (6, n, k), (count, n), (count, 20), (6, n, 20), (6, 20, k)
        )
        dout = dy[:tokens]
        full, dy, z = (array.at[known:].set(jnp.nan) for array in (full, dy, z))
        rows, sizes = jnp.asarray(rng.integers(0, tokens, count), jnp.int32), jnp.asarray(sizes, jnp.int32)
        cases = {
            "contiguous": (grouped_matmul, exact.matmul, (full, w, sizes), {}),
            "gathered": (grouped_matmul, exact.matmul, (x, w, sizes), {"rows": rows, "low_rank": (z, b)}),
            "dx": (grouped_matmul_dx, exact.dx, (dy, w, sizes), {"low_rank": (z, a)}),
            "dx gathered": (grouped_matmul_dx, exact.dx, (dout, w, sizes), {"rows": rows}),
            "dw": (grouped_matmul_dw, exact.dw, (dy, full, sizes), {}),
            "dw gathered": (grouped_matmul_dw, exact.dw, (dy, x, sizes), {"rows": rows}),
        }
        for name, (function, plain, arguments, options) in cases.items():
            jax.block_until_ready([jnp.full((count, k), jnp.nan, dtype) for _ in range(2)])
            own = slice(None) if function is grouped_matmul_dw else slice(known)
            found = products[function](*arguments, **options)[own]
            assert_close(found, plain(*arguments, **options)[own], dtype, f"{title}, {name}")
            again = products[function](*arguments, **options)[own]
            assert bool(jnp.array_equal(found, again)), f"{title}, {name}"


@pytest.mark.parametrize("cluster, columns", [(1, 256), (2, 256), (1, 128), (2, 128), (1, 64)])
def test_every_configuration(cluster, columns):
    x, w, dy = draw("bfloat16", (576, 256), (6, 320, 256), (576, 320))
    sizes = jnp.asarray([130, 0, 257, 63, 64, 5], jnp.int32)
    config = MatmulConfig(columns, cluster=cluster)
    options = {"config": config, "cores": 132}
    found = mosaic_sm90.matmul_of_tiles(x, w, sizes, transposed=False, **options)
    assert_close(found, exact.matmul(x, w, sizes), "bfloat16")
    assert_close(
        mosaic_sm90.matmul_of_tiles(dy, w, sizes, transposed=True, **options), exact.dx(dy, w, sizes), "bfloat16"
    )
    found = mosaic_sm90.dw_of_tiles(dy, x, sizes, dtype=jnp.bfloat16, **options)
    assert_close(found, exact.dw(dy, x, sizes), "bfloat16")


def test_repetitions_are_equal_bit_for_bit():
    """A missing wait shows as a rare difference."""
    tokens, k, n, groups = 8192, 768, 512, 64
    rng = np.random.default_rng(time.time_ns())
    chosen = np.sort(rng.integers(0, groups, 4 * tokens))
    sizes = jnp.asarray(np.bincount(chosen, minlength=groups), jnp.int32)
    rows = jnp.asarray(rng.permutation(4 * tokens) % tokens, jnp.int32)
    x, w, dy = draw("bfloat16", (tokens, k), (groups, n, k), (4 * tokens, n))

    @jax.jit
    def products(x, w, dy):
        return (
            grouped_matmul(x, w, sizes, rows=rows),
            grouped_matmul_dx(dy, w, sizes),
            grouped_matmul_dw(dy, x, sizes, rows=rows),
        )

    first = jax.tree.map(np.asarray, products(x, w, dy))
    for _ in range(100):
        for one, other in zip(products(x, w, dy), first, strict=True):
            assert bool(jnp.array_equal(one, other))


@pytest.mark.parametrize("shape", [(1536, 2048), (200, 192)], ids=str)
@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("dtype, weight_dtype", [("bfloat16", None), ("float16", "bfloat16")])
def test_nf4(shape, gradient, dtype, weight_dtype):
    """Every configuration of tiles, by the number of rows."""
    groups, (out, columns) = 6, shape
    width, plain = (out, exact.dx) if gradient else (columns, exact.matmul)
    codes, absmax = nf4.quantize(draw("float32", (groups * out, columns))[0])
    codes = nf4.reorder(codes, "bitsandbytes", "split").reshape(groups, out, columns // 2)
    absmax = absmax.reshape(groups, out, columns // 64)
    options = {"shape": shape, "gradient": gradient, "weight_dtype": weight_dtype, "implementation": "triton"}
    decoded = nf4.dequantize(
        codes, absmax, shape=(groups * out, columns), dtype=dtype, weight_dtype=weight_dtype, implementation="xla"
    ).reshape(groups, out, columns)
    for sizes in ([3, 0, 9, 1, 8, 2], [33, 0, 17, 6, 0, 5], [100, 0, 17, 64, 1, 90]):
        (x,) = draw(dtype, (sum(sizes) + 3, width))
        counts = jnp.asarray(sizes, jnp.int32)
        found = grouped_nf4_matmul(x, codes, absmax, counts, **options)
        assert_close(found, plain(x, decoded, counts), dtype, str(sizes))
    # Rows of the identity select decoded values, which sums with zeros keep to the bit.
    for number in (4, 12, 40):
        for first in range(0, width, number):
            chosen = jnp.arange(first, min(first + number, width), dtype=jnp.int32)
            counts = jnp.full((groups,), chosen.size, jnp.int32)
            rows = jnp.tile(chosen, groups)
            found = grouped_nf4_matmul(jnp.eye(width, dtype=dtype), codes, absmax, counts, rows=rows, **options)
            found = found.reshape(groups, chosen.size, -1)
            expected = decoded[:, chosen] if gradient else decoded[:, :, chosen].swapaxes(1, 2)
            assert bool(jnp.array_equal(found, expected)), (number, first)
            if first > 8 * number:
                break
