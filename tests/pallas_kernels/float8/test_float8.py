"""Rows in float8 against the definition, whichever way they are made, and their products against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.float8 import matmul, quantize_columns, quantize_rows, reference, triton
from tests.support import resources
from tests.support.aot import AOT, needs_cuda_plugin


def rows(columns, dtype, seed=0):
    """Rows of very different sizes, with outlier features."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(24, columns)) * np.exp(4 * rng.normal(size=(24, 1)))
    x[:, 3] *= 100
    x[5] = 0
    return jnp.asarray(x, dtype)


def bits(codes, scales):
    return np.asarray(codes).view(np.uint8), np.asarray(scales).view(np.uint32)


@pytest.mark.parametrize("columns", [64, 96])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_every_implementation_equals_the_definition_bit_for_bit(columns, dtype):
    x = rows(columns, dtype)
    expected = bits(*reference.quantize_rows(x))
    kernel = triton.quantize_rows(x, interpret=True)
    for found in (quantize_rows(x, implementation="xla"), kernel, quantize_columns(x.T)):
        for ours, theirs in zip(bits(*found), expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_a_scale_is_the_smallest_power_of_two_that_fits_and_never_hides_what_is_not_finite():
    x = jnp.asarray([[448.0, 1], [449, 1], [-1.75, 0], [3e38, 1], [1e-38, 0], [np.inf, 1], [np.nan, 1]], jnp.float32)
    codes, scales = quantize_rows(x)
    np.testing.assert_array_equal(scales[:4], [1, 2, 2.0**-8, 2.0**120])
    product = matmul(codes, scales, *quantize_rows(jnp.ones((16, 2), jnp.bfloat16)))
    assert np.isfinite(np.asarray(product, np.float32)).all(axis=1).tolist() == [True] * 5 + [False] * 2


@pytest.mark.parametrize("promoted", [False, True])
def test_a_product_is_that_of_the_rounded_operands(promoted):
    x, w = rows(256, jnp.bfloat16), rows(256, jnp.bfloat16, seed=1)
    x8, w8 = quantize_rows(x), quantize_rows(w)
    found = jax.jit(lambda *operands: matmul(*operands, promoted=promoted))(*x8, *w8)
    assert found.dtype == jnp.bfloat16
    wide = [np.asarray(codes, np.float64) * np.asarray(scales, np.float64)[:, None] for codes, scales in (x8, w8)]
    # one rounding to bfloat16, of the sum of absolute terms
    bound = 2.0**-8 * (np.abs(wide[0]) @ np.abs(wide[1]).T)
    assert (np.abs(np.asarray(found, np.float64) - wide[0] @ wide[1].T) <= bound).all()


def test_operands_that_do_not_fit_are_refused():
    codes, scales = quantize_rows(jnp.ones((8, 32), jnp.bfloat16))
    with pytest.raises(
        ValueError, match=r"float8.matmul: expected x .* got float8_e4m3fn\(8, 32\), float8_e4m3fn\(32, 8"
    ):
        matmul(codes, scales, codes.T, scales)
    with pytest.raises(ValueError, match="quantize_rows: x must be .* got int32"):
        quantize_rows(jnp.ones((8, 32), jnp.int32))


@pytest.mark.aot
@needs_cuda_plugin
def test_the_kernel_reads_a_row_once_without_spills(tmp_path):
    aot = AOT("h200")
    used = resources.of_triton(aot, quantize_rows, aot.spec((8192, 28672), jnp.bfloat16), folder=tmp_path)
    assert used is None or used.spill_bytes == used.stack_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [4096, 6144, 14336, 28672])
def test_rows_on_the_card_are_the_same_bit_for_bit(columns):
    x = rows(columns, jnp.bfloat16)
    expected = bits(*reference.quantize_rows(x))
    for name in ("triton", "xla"):
        found = bits(*jax.jit(lambda x, name=name: quantize_rows(x, implementation=name))(x))
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_array_equal(ours, theirs, err_msg=name)


@pytest.mark.gpu
@pytest.mark.parametrize("promoted", [False, True])
def test_products_on_the_card_beside_float64(promoted):
    """Sums of 14,336 terms, of the tensor cores' own precision or promoted to float32 as they go."""
    rng = np.random.default_rng(0)
    x8, w8 = (quantize_rows(jnp.asarray(rng.normal(size=(256, 14336)), jnp.bfloat16)) for _ in range(2))
    found = jax.jit(lambda *operands: matmul(*operands, promoted=promoted))(*x8, *w8)
    wide = [np.asarray(codes, np.float64) * np.asarray(scales, np.float64)[:, None] for codes, scales in (x8, w8)]
    exact = wide[0] @ wide[1].T
    error = np.linalg.norm(np.asarray(found, np.float64) - exact) / np.linalg.norm(exact)
    print(f"promoted {promoted}: relative error {error:.2e}")
    # e4m3 operands alone are off by 3.7%; sums of fewer bits must stay far below
    assert error < (4e-3 if promoted else 1e-2)
