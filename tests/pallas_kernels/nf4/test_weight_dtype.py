"""Values are rounded to the dtype that a checkpoint names, then to the one that is computed in; numpy is the oracle."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import nf4
from pallas_kernels.nf4 import config, mosaic_sm90, reference, triton
from tests.support.close import assert_bit_equal
from tests.support.interpreter import mosaic_interpreter

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
#: (named by the checkpoint, computed in)
PAIRS = [(named, dtype) for named in DTYPES for dtype in DTYPES]
TWICE = [("float16", "bfloat16"), ("bfloat16", "float16")]
#: Rounding sums in float32 to the dtype, over the largest.
TOLERANCE = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 1e-6}
BEHIND_THE_END = pytest.mark.newer_jax("the interpreter of jax 0.10 misplaces rows behind the end of an array")


def packed(shape, seed=0):
    """Codes in split order, and scales of which some give subnormal float16."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (shape[0], shape[1] // 2), dtype=np.uint8)
    return codes, np.exp(rng.normal(-5, 4, (shape[0], shape[1] // 64))).clip(1e-7, 6e4).astype(np.float32)


def decoded(codes, absmax, *dtypes):
    """By numpy, which rounds when it is told to."""
    blocks = codes.reshape(*absmax.shape, 32)
    values = nf4.NF4_VALUES[np.concatenate([blocks & 15, blocks >> 4], axis=-1)] * absmax[..., None]
    for name in dtypes:
        values = values.astype(DTYPES[name])
    return values.reshape(len(codes), -1)


@pytest.mark.parametrize(("named", "dtype"), PAIRS)
def test_decoding_rounds_to_the_named_dtype_first(named, dtype):
    shape = (24, 192)
    codes, absmax = packed(shape)
    expected = decoded(codes, absmax, named, dtype)

    def decode(codes, absmax):
        found = nf4.dequantize(codes, absmax, shape=shape, dtype=dtype, weight_dtype=named)
        return found, found.astype(jnp.float32)  # a conversion that XLA would like to merge with those before

    found, wide = jax.jit(decode)(codes, absmax)
    assert_bit_equal(found, expected)
    assert_bit_equal(wide, expected.astype(np.float32))
    through = None if named in ("float32", dtype) else named
    by_definition = jax.jit(
        lambda c, a: reference.dequantize(c, a, shape=shape, dtype=dtype, order="split", through=through)
    )
    assert_bit_equal(by_definition(codes, absmax), expected)


def test_the_pairs_differ():
    """float32 over 16 bits, and 16 bits over the other 16, are other numbers than one rounding gives."""
    codes, absmax = packed((24, 192))
    for named, dtype in [*TWICE, ("bfloat16", "float32"), ("float16", "float32")]:
        assert (decoded(codes, absmax, named, dtype) != decoded(codes, absmax, dtype)).any()


@pytest.mark.parametrize(("named", "dtype"), TWICE)
def test_kernels_round_twice_in_the_interpreter(named, dtype):
    codes, absmax = packed((24, 192))
    expected = decoded(codes, absmax, named, dtype)
    blocks = codes.reshape(-1, 32), absmax.reshape(-1)
    tile = config.triton_blocks(dtype)
    found = triton.dequantize(*blocks, dtype=dtype, tile=tile, through=named, interpret=True)
    assert_bit_equal(found.reshape(expected.shape), expected)
    with mosaic_interpreter() as interpret:
        tile = config.mosaic_blocks(dtype)
        found = mosaic_sm90.dequantize(*blocks, dtype=dtype, tile=tile, through=named, interpret=interpret)
    assert_bit_equal(found.reshape(expected.shape), expected)


@pytest.mark.parametrize("named", ["bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_and_gradients_are_those_of_the_named_values(named, dtype):
    shape = (96, 128)
    codes, absmax = packed(shape)
    dense = decoded(codes, absmax, named, dtype).astype(np.float64)
    rng = np.random.default_rng(1)
    x, dy = (rng.standard_normal((5, size)).astype(DTYPES[dtype]) for size in shape[::-1])

    @jax.jit
    def both(x, dy):
        y, pullback = jax.vjp(lambda x: nf4.matmul(x, codes, absmax, shape=shape, weight_dtype=named), x)
        return y, *pullback(dy)

    for actual, wanted in zip(both(x, dy), (x @ dense.T, dy @ dense), strict=True):
        assert actual.dtype == dtype
        assert np.abs(np.asarray(actual, np.float64) - wanted).max() <= TOLERANCE[dtype] * np.abs(wanted).max()


@pytest.mark.parametrize(("named", "dtype"), TWICE)
@BEHIND_THE_END
def test_the_kernel_that_decodes_as_it_multiplies(named, dtype):
    """Rows with a single 1 pick out decoded weights, to the bit."""
    shape = (128, 512)
    codes, absmax = packed(shape)
    dense = decoded(codes, absmax, named, dtype)
    chosen = np.random.default_rng(0).integers(0, shape[1], 3)
    x = jax.nn.one_hot(chosen, shape[1], dtype=dtype)
    options = {"config": config.MatmulRsConfig(64, 1), "gradient": False, "cores": 1}
    with mosaic_interpreter() as interpret:
        found = mosaic_sm90.matmul_rs(x, codes, absmax, through=named, interpret=interpret, **options)
    np.testing.assert_array_equal(np.asarray(found, np.float32), dense[:, chosen].T.astype(np.float32))


def test_another_dtype_is_refused():
    codes, absmax = packed((4, 64))
    with pytest.raises(ValueError, match="weight_dtype must be bfloat16, float16 or float32, got int8"):
        nf4.dequantize(codes, absmax, shape=(4, 64), dtype="float32", weight_dtype="int8")
