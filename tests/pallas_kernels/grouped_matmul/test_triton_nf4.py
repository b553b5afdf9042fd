"""Products with NF4 matrices: interpreted, bit for bit the decoded values; compiled for absent cards; who is chosen."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import nf4
from pallas_kernels.grouped_matmul import grouped_nf4_matmul, triton_nf4
from pallas_kernels.grouped_matmul.config import NF4_MOST_ROWS, NF4Config
from pallas_kernels.grouped_matmul.nf4 import REGISTRY
from tests.pallas_kernels.grouped_matmul import exact
from tests.support import resources
from tests.support.aot import AOT, needs_cuda_plugin

TOLERANCE = {"bfloat16": 2**-8, "float16": 2**-11}  # one rounding to the dtype of a sum in float32, of the largest
X, OUT, IN, T, M = 4, 40, 192, 9, 71  # neither side is a multiple of a tile's
SIZES = [33, 0, 20, 5]  # of 71 rows; the last thirteen are no group's
CONFIG = NF4Config(rows=16, out=32, blocks=2)


@pytest.fixture(scope="module")
def packed():
    rng = np.random.default_rng(0)
    codes, absmax = nf4.quantize(jnp.asarray(rng.standard_normal((X * OUT, IN)), jnp.float32))
    codes = nf4.reorder(codes, "bitsandbytes", "split")
    return codes.reshape(X, OUT, IN // 2), absmax.reshape(X, OUT, IN // 64)


def decoded(packed, dtype, weight_dtype=None):
    flat = nf4.dequantize(*packed, shape=(X * OUT, IN), dtype=dtype, weight_dtype=weight_dtype)
    return flat.reshape(X, OUT, IN)


@pytest.mark.parametrize(
    "gradient, dtype, through", [(False, "bfloat16", None), (True, "float16", "bfloat16")], ids=["forward", "gradient"]
)
def test_interpreted(packed, gradient, dtype, through):
    rng = np.random.default_rng(1)
    width = OUT if gradient else IN
    options = {"gradient": gradient, "through": through, "config": CONFIG, "interpret": True}
    sizes, rows = jnp.asarray(SIZES, jnp.int32), jnp.asarray(rng.integers(0, T, M), jnp.int32)
    matrices, plain = decoded(packed, dtype, through), exact.dx if gradient else exact.matmul
    for tokens, chosen in ((T, rows), (M, None)):
        x = jnp.asarray(rng.standard_normal((tokens, width)), dtype)
        found = triton_nf4.matmul(x, *packed, sizes, chosen, **options)
        expected = plain(x, matrices, sizes, chosen)
        assert found.dtype == dtype and found.shape == expected.shape
        assert np.abs(np.asarray(found, np.float64) - expected).max() <= TOLERANCE[dtype] * np.abs(expected).max()
    # Rows of the identity select decoded values, which sums with zeros keep to the bit.
    sizes, groups = jnp.full((X,), width, jnp.int32), jnp.tile(jnp.arange(width, dtype=jnp.int32), X)
    found = triton_nf4.matmul(jnp.eye(width, dtype=dtype), *packed, sizes, groups, **options)
    found = found.reshape(X, width, -1)
    np.testing.assert_array_equal(found if gradient else found.swapaxes(1, 2), matrices)


def test_decode_first(packed):
    """The choice off a GPU, gathered, against its parts."""
    x, sizes, rows = jnp.ones((T, IN), jnp.float32), jnp.asarray(SIZES, jnp.int32), jnp.arange(M, dtype=jnp.int32) % T
    found = jax.jit(lambda x: grouped_nf4_matmul(x, *packed, sizes, shape=(OUT, IN), rows=rows))(x)
    # float32 sums of 192 terms
    np.testing.assert_allclose(found, exact.matmul(x, decoded(packed, "float32"), sizes, rows), atol=1e-4)


@pytest.mark.aot
@needs_cuda_plugin
@pytest.mark.exhaustive("a100-80-gradient")
@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("card", ["h200", "a100-80", "4090"])
def test_compiled(card, gradient, tmp_path):
    """No spills; and four codes of one block come as one word, as the look-up takes them to."""
    aot, (groups, out, columns) = AOT(card), (128, 1536, 2048)
    specs = (
        aot.spec((512, out if gradient else columns), jnp.bfloat16),
        aot.spec((groups, out, columns // 2), jnp.uint8),
        aot.spec((groups, out, columns // 64), jnp.float32),
        aot.spec((groups,), jnp.int32),
    )

    def product(x, codes, absmax, sizes):
        return grouped_nf4_matmul(x, codes, absmax, sizes, shape=(out, columns), gradient=gradient)

    used = resources.of_triton(aot, product, *specs, folder=tmp_path)
    if used is not None:
        assert used.spill_bytes == used.stack_bytes == 0
    [text] = [text for file in tmp_path.glob("*.ptx") if "mov.b32 w, " in (text := file.read_text())]
    words = set(re.findall(r"mov\.b32 w, (%r\d+);", text))
    loads = re.findall(r"ld\.(?:shared|global)\S*b32\s+(\{[^}]*\}|%r\d+), \[", text)
    assert words and words <= {register for load in loads for register in re.findall(r"%r\d+", load)}


@needs_cuda_plugin
def test_who_is_chosen():
    few = {"rows": 4 * NF4_MOST_ROWS, "shape": (4, 64, 128), "dtype": jnp.bfloat16}
    with AOT("a100-80").tracing():
        assert REGISTRY.choose(None, **few) == "triton"
        assert REGISTRY.choose(None, **few | {"rows": few["rows"] + 1}) == "decode_first"


def test_refusals(packed):
    codes, absmax = packed
    x, sizes = jnp.ones((M, IN), jnp.bfloat16), jnp.asarray(SIZES, jnp.int32)
    with pytest.raises(ValueError, match=r"expected x \[71, 40\] in bfloat16 or float16 or float32 for 4 matrices"):
        grouped_nf4_matmul(x, codes, absmax, sizes, shape=(OUT, IN), gradient=True)
    with pytest.raises(ValueError, match=r"expected codes \[4, 40, 96\] in uint8 .*, given \[160, 96\] in uint8"):
        grouped_nf4_matmul(x, codes.reshape(X * OUT, -1), absmax, sizes, shape=(OUT, IN))
    with pytest.raises(ValueError, match="expected rows of whole blocks of 64 elements"):
        grouped_nf4_matmul(x, codes, absmax, sizes, shape=(OUT, 100))
    with pytest.raises(NotImplementedError, match=r"compute capability 8.0 or more, the target is cpu"):
        grouped_nf4_matmul(x, codes, absmax, sizes, shape=(OUT, IN), implementation="triton")
