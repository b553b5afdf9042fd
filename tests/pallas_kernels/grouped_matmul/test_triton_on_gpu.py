"""The Triton kernels on the card against sums in float64; decoded values and repetitions bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import nf4
from pallas_kernels.grouped_matmul import grouped_matmul, grouped_matmul_dw, grouped_matmul_dx, grouped_nf4_matmul
from tests.pallas_kernels.grouped_matmul import exact
from tests.pallas_kernels.grouped_matmul.test_on_gpu import SIZES, assert_close, draw

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("n, k", [(328, 264), (512, 192), (24, 320), (41, 77)], ids=str)
def test_products(sizes, n, k):
    dtype = "float16" if n == 512 else "bfloat16"
    count, tokens = max(601, sum(sizes)), 300
    x, full, w, dy, z, b, a = draw(
        dtype, (tokens, k), (count, k), (6, n, k), (count, n), (count, 20), (6, n, 20), (6, 20, k)
    )
    rows = jnp.asarray(np.random.default_rng(count).integers(0, tokens, count), jnp.int32)
    sizes = jnp.asarray(sizes, jnp.int32)
    cases = {
        "contiguous": (grouped_matmul, exact.matmul, (full, w, sizes), {}),
        "gathered": (grouped_matmul, exact.matmul, (x, w, sizes), {"rows": rows, "low_rank": (z, b)}),
        "dx": (grouped_matmul_dx, exact.dx, (dy, w, sizes), {"low_rank": (z, a)}),
        "dw": (grouped_matmul_dw, exact.dw, (dy, full, sizes), {}),
        "dw gathered": (grouped_matmul_dw, exact.dw, (dy, x, sizes), {"rows": rows}),
    }
    for name, (function, plain, arguments, options) in cases.items():
        product = jax.jit(lambda *arrays, f=function, **options: f(*arrays, implementation="triton", **options))
        found = product(*arguments, **options)
        assert_close(found, plain(*arguments, **options), dtype, name)
        assert bool(jnp.array_equal(found, product(*arguments, **options))), name


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
