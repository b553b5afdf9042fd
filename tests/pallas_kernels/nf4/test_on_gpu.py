"""Both kernels on the card, to the bit, on fresh random codes; the reference is numpy's."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from convert.formats.nf4 import encode, mean
from pallas_kernels import dispatch, nf4
from pallas_kernels.cards import compute_capability_of
from pallas_kernels.nf4 import config
from pallas_kernels.nf4.mosaic_sm90.matvec_sums import TABLE_SCALE
from tests.support.matrices import LLAMA_8B, WHOLE_ROWS

pytestmark = pytest.mark.gpu

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
SHAPES = [pytest.param(matrix.shape, id=matrix.name) for matrix in (*WHOLE_ROWS, *LLAMA_8B)]


def implementations(shape):
    from pallas_kernels.nf4.implementations import DEQUANTIZE

    options = {"shape": shape, "dtype": jnp.bfloat16, "through": None, "order": "split", "own_map": True}
    reasons = DEQUANTIZE.reasons(**options)
    return [name for name, reason in reasons.items() if reason is None]


def random_packed(shape):
    rng = np.random.default_rng()
    blocks = shape[0] * shape[1] // 64
    codes = rng.integers(0, 256, (blocks, 32), dtype=np.uint8)
    absmax = np.exp(rng.normal(-4, 2, blocks)).astype(np.float32)
    absmax[rng.integers(0, blocks)] = 0
    return codes, absmax


def decoded_by_numpy(codes, absmax, shape, dtype, values=nf4.NF4_VALUES):
    """The split order, a float32 product, one rounding."""
    nibbles = np.concatenate([codes & 15, codes >> 4], axis=1)
    return (values[nibbles] * absmax[:, None]).astype(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_implementation_is_bit_equal(shape, dtype):
    codes, absmax = random_packed(shape)
    expected = decoded_by_numpy(codes, absmax, shape, DTYPES[dtype])
    for name in implementations(shape):
        decode = jax.jit(lambda c, a, name=name: nf4.dequantize(c, a, shape=shape, dtype=dtype, implementation=name))
        # The result's memory may hold NaN: an element that nobody writes shows.
        jax.block_until_ready([jnp.full(shape, jnp.nan, dtype) for _ in range(2)])
        actual = np.asarray(decode(codes, absmax))
        unsigned = f"uint{8 * actual.dtype.itemsize}"
        np.testing.assert_array_equal(actual.view(unsigned), expected.view(unsigned), err_msg=name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("named", ["bfloat16", "float16"])
def test_every_implementation_rounds_to_the_named_dtype_first(named, dtype):
    shape = LLAMA_8B[0].shape
    codes, absmax = random_packed(shape)
    expected = decoded_by_numpy(codes, absmax, shape, DTYPES[named]).astype(DTYPES[dtype])
    options = {"shape": shape, "dtype": dtype, "weight_dtype": named}
    for name in implementations(shape):
        actual = np.asarray(jax.jit(functools.partial(nf4.dequantize, **options, implementation=name))(codes, absmax))
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
    np.testing.assert_array_equal(jax.jit(nf4.mean)(scales), mean(scales))
    repeated = np.repeat(expected.nested_absmax, 256)[: scales.size]
    np.testing.assert_array_equal(decoded, nf4.DYNAMIC_MAP[expected.absmax] * repeated + np.float32(0.8))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("rows", [1, 13, 64, 100, 300, 1025])
@pytest.mark.parametrize("shape", [(704, 1536), (192, 64)])
def test_product_and_gradient(shape, rows, dtype):
    """Whatever kernel serves: odd rows, tiles that end with the matrix."""
    rng = np.random.default_rng()
    packed = encode(rng.standard_normal(shape).astype(np.float32))
    codes = nf4.reorder(jnp.asarray(packed.codes), "bitsandbytes", "split")
    absmax = packed.absmax
    x, dy = (rng.standard_normal((rows, size)).astype(DTYPES[dtype]) for size in (shape[1], shape[0]))
    dense = decoded_by_numpy(np.asarray(codes).reshape(-1, 32), absmax, shape, DTYPES[dtype]).astype(np.float64)

    @jax.jit
    def both(x, dy, codes, absmax):
        y, pullback = jax.vjp(lambda x: nf4.matmul(x, codes, absmax, shape=shape), x)
        return y, *pullback(dy)

    # One rounding to the dtype of sums of up to 1,536 products that are exact in float32.
    tolerance = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2e-6}[dtype]
    if rows <= config.MATVEC_ROWS:  # its weights are not rounded, but the sixteen values
        tolerance *= 1.5
    expected = (x.astype(np.float64) @ dense.T, dy.astype(np.float64) @ dense)
    jax.block_until_ready([jnp.full(wanted.shape, jnp.nan, dtype) for wanted in expected])
    for actual, wanted in zip(both(x, dy, codes, absmax), expected, strict=True):
        assert np.abs(np.asarray(actual, np.float64) - wanted).max() <= tolerance * np.abs(wanted).max()


@pytest.mark.parametrize(
    "rows, gradient", [(65, False), (128, False), (512, False), (1, True), (32, True), (128, True), (512, True)]
)
@pytest.mark.parametrize("shape", [(704, 1536), (768, 1536)], ids=["by every kernel", "gradient in registers too"])
@pytest.mark.parametrize("named", ["bfloat16", "float16"])
def test_fused_products_decode_to_the_bit(named, rows, gradient, shape):
    """Rows with a single 1 pick out decoded weights."""
    if "fused" not in implementations_of_product(rows, shape, gradient):
        pytest.skip("this card decodes first")
    codes, absmax = random_packed(shape)
    absmax = absmax.clip(0, 6e4)  # infinity times 0 would be NaN
    dense = decoded_by_numpy(codes, absmax, shape, DTYPES[named]).astype(ml_dtypes.bfloat16).astype(np.float32)
    chosen = np.random.default_rng().integers(0, shape[0 if gradient else 1], rows)
    picks = jax.nn.one_hot(chosen, shape[0 if gradient else 1], dtype=jnp.bfloat16)
    product = jax.jit(fused_product, static_argnames=("shape", "gradient", "named"))
    found = product(picks, codes, absmax, shape=shape, gradient=gradient, named=named)
    np.testing.assert_array_equal(found.astype(jnp.float32), dense[chosen] if gradient else dense[:, chosen].T)


@pytest.mark.parametrize("rows", [1, 8, 11, 32])
@pytest.mark.parametrize("shape", [(704, 1536), (6144, 4096), (28672, 4096), (192, 2048)])
def test_few_rows_round_the_values_and_the_result_alone(rows, shape):
    """Rows with a single 1 pick out weights, to the bit: rounded values of NF4, exact scales, one rounding more."""
    if "fused" not in implementations_of_product(rows, shape, False):
        pytest.skip("this card decodes first")
    codes, absmax = random_packed(shape)
    absmax = absmax.clip(1e-30, 1e30)
    values = (nf4.NF4_VALUES * np.float32(TABLE_SCALE)).astype(ml_dtypes.bfloat16).astype(np.float32)
    dense = decoded_by_numpy(codes, absmax, shape, np.float32, values) * np.float32(1 / TABLE_SCALE)
    chosen = np.random.default_rng().integers(0, shape[1], rows)
    picks = jax.nn.one_hot(chosen, shape[1], dtype=jnp.bfloat16)
    product = jax.jit(fused_product, static_argnames=("shape", "gradient", "named"))
    jax.block_until_ready(jnp.full((rows, shape[0]), jnp.nan, jnp.bfloat16))
    found = product(picks, codes, absmax, shape=shape, gradient=False, named="float32")
    np.testing.assert_array_equal(np.asarray(found), dense[:, chosen].T.astype(ml_dtypes.bfloat16))


def implementations_of_product(rows, shape, gradient):
    """The implementations of a product that serve on this card."""
    from fastjax.bench.nf4 import IMPLEMENTATIONS, product_of

    spec, found = jax.ShapeDtypeStruct, []
    x = spec((rows, shape[0 if gradient else 1]), jnp.bfloat16)
    packed = spec((shape[0], shape[1] // 2), jnp.uint8), spec((shape[0], shape[1] // 64), jnp.float32)
    for name in IMPLEMENTATIONS:
        with contextlib.suppress(NotImplementedError):
            jax.eval_shape(product_of(shape, name, gradient), x, *packed)
            found.append(name)
    return found


def fused_product(x, codes, absmax, *, shape, gradient, named):
    def product(x):
        return nf4.matmul(x, codes, absmax, shape=shape, weight_dtype=named, implementation="fused")

    return jax.vjp(product, jnp.zeros((x.shape[0], shape[1]), x.dtype))[1](x)[0] if gradient else product(x)


def test_the_card_is_known():
    target = dispatch.target()
    assert target.platform == "cuda"
    assert compute_capability_of(target.device_kind) == target.compute_capability
