"""Both kernels on the card, to the bit, on fresh random codes; the reference is numpy's."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from convert.formats.nf4 import encode
from pallas_kernels import dispatch, nf4
from pallas_kernels.nf4.shapes import LLAMA_8B, WHOLE_ROWS

pytestmark = pytest.mark.gpu

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
SHAPES = [pytest.param(matrix.shape, id=matrix.name) for matrix in (*WHOLE_ROWS, *LLAMA_8B)]


def implementations(shape):
    from pallas_kernels.nf4 import api

    return [name for name, reason in api._candidates(shape, jnp.bfloat16, "split", None) if reason is None]


def random_packed(shape):
    rng = np.random.default_rng()
    blocks = shape[0] * shape[1] // 64
    codes = rng.integers(0, 256, (blocks, 32), dtype=np.uint8)
    absmax = np.exp(rng.normal(-4, 2, blocks)).astype(np.float32)
    absmax[rng.integers(0, blocks)] = 0
    return codes, absmax


def decoded_by_numpy(codes, absmax, shape, dtype):
    """The split order, a float32 product, one rounding."""
    nibbles = np.concatenate([codes & 15, codes >> 4], axis=1)
    return (nf4.NF4_VALUES[nibbles] * absmax[:, None]).astype(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_implementation_is_bit_equal(shape, dtype):
    codes, absmax = random_packed(shape)
    expected = decoded_by_numpy(codes, absmax, shape, DTYPES[dtype])
    for name in implementations(shape):
        decode = jax.jit(lambda c, a, name=name: nf4.dequantize(c, a, shape=shape, dtype=dtype, implementation=name))
        # Memory that the result may be given: full of NaN, so that an element that nobody writes shows.
        jax.block_until_ready([jnp.full(shape, jnp.nan, dtype) for _ in range(2)])
        actual = np.asarray(decode(codes, absmax))
        unsigned = f"uint{8 * actual.dtype.itemsize}"
        np.testing.assert_array_equal(actual.view(unsigned), expected.view(unsigned), err_msg=name)


@pytest.mark.parametrize("shape", [(7, 13), (64, 100), (512, 1024)])
def test_quantising_equals_bitsandbytes_arithmetic(shape):
    """Divisions, products and sums are rounded on the card as they are on a CPU, so that codes and scales are equal."""
    weight = np.random.default_rng().standard_normal(shape).astype(np.float32)
    expected = encode(weight, nested=True, offset=0.8)
    scales = encode(weight).absmax
    codes, absmax = jax.jit(nf4.quantize)(weight)
    np.testing.assert_array_equal(codes, expected.codes)
    np.testing.assert_array_equal(absmax, scales)
    quantized, nested_absmax, offset = jax.jit(nf4.quantize_absmax)(scales, np.float32(0.8))
    np.testing.assert_array_equal(quantized, expected.absmax)
    np.testing.assert_array_equal(nested_absmax, expected.nested_absmax)
    decoded = jax.jit(nf4.dequantize_absmax)(quantized, nested_absmax, nf4.DYNAMIC_MAP, offset)
    repeated = np.repeat(expected.nested_absmax, 256)[: scales.size]
    np.testing.assert_array_equal(decoded, nf4.DYNAMIC_MAP[expected.absmax] * repeated + np.float32(0.8))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_product_and_gradient(dtype):
    shape = (1024, 2048)
    codes, absmax = random_packed(shape)
    absmax = np.full_like(absmax, 0.02)
    rng = np.random.default_rng()
    x, dy = (rng.standard_normal((64, size)).astype(DTYPES[dtype]) for size in (shape[1], shape[0]))
    dense = decoded_by_numpy(codes, absmax, shape, DTYPES[dtype]).astype(np.float64)

    @jax.jit
    def both(x, dy, codes, absmax):
        y, pullback = jax.vjp(lambda x: nf4.matmul(x, codes, absmax, shape=shape), x)
        return y, *pullback(dy)

    # One rounding to the dtype of sums of 1,024 and 2,048 products that are exact in float32.
    tolerance = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2e-6}[dtype]
    expected = (x.astype(np.float64) @ dense.T, dy.astype(np.float64) @ dense)
    for actual, wanted in zip(both(x, dy, codes, absmax), expected, strict=True):
        assert np.abs(np.asarray(actual, np.float64) - wanted).max() <= tolerance * np.abs(wanted).max()


def test_the_card_is_known():
    target = dispatch.target()
    assert target.platform == "cuda"
    assert dispatch.compute_capability_of(target.device_kind) == target.compute_capability
