"""Every implementation against the reference, bit for bit, and the reference against bitsandbytes and bytes by hand."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import nf4
from pallas_kernels.nf4 import config, mosaic_sm90, reference, triton
from pallas_kernels.nf4.codebook import num_blocks
from tests.support.close import assert_bit_equal
from tests.support.interpreter import mosaic_interpreter
from tests.support.matrices import IRREGULAR, WHOLE_ROWS

DTYPES = [jnp.dtype(name) for name in ("bfloat16", "float16", "float32")]
WHOLE = [pytest.param(matrix.shape, id=matrix.name) for matrix in WHOLE_ROWS]
ALL = [pytest.param(matrix.shape, id=matrix.name) for matrix in WHOLE_ROWS + IRREGULAR]


def packed(shape, seed=0):
    """Random codes in whole blocks and scales of very different magnitudes."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, num_blocks(shape) * 32, dtype=np.uint8)
    absmax = np.exp(rng.normal(-4, 3, num_blocks(shape))).astype(np.float32)
    return jnp.asarray(codes), jnp.asarray(absmax)


def test_reference_by_hand():
    codes = jnp.asarray([0xF0, 0x71] + [0x77] * 30, jnp.uint8)
    absmax, values = jnp.asarray([2.0]), 2 * nf4.NF4_VALUES
    paired, split = (
        reference.dequantize(codes, absmax, shape=(1, 64), dtype=jnp.float32, order=order)[0]
        for order in ("bitsandbytes", "split")
    )
    np.testing.assert_array_equal(paired[:4], values[[15, 0, 7, 1]])
    np.testing.assert_array_equal(split[jnp.asarray([0, 32, 1, 33])], values[[0, 15, 1, 7]])


@pytest.mark.torch
@pytest.mark.parametrize("shape", ALL)
def test_reference_equals_bitsandbytes(bitsandbytes, shape):
    import torch

    codes, absmax = packed(shape)
    codes = codes[: -(-shape[0] * shape[1] // 2)]
    for dtype in DTYPES:
        state = bitsandbytes.QuantState(
            absmax=torch.from_numpy(np.array(absmax)),
            # One row: its AVX-512 code restarts the blocks at every row, which its encoder and its CUDA code do not.
            shape=torch.Size((1, shape[0] * shape[1])),
            code=torch.from_numpy(nf4.NF4_VALUES.copy()),
            blocksize=64,
            quant_type="nf4",
            dtype=getattr(torch, dtype.name),
        )
        expected = bitsandbytes.dequantize_4bit(torch.from_numpy(np.array(codes)).reshape(-1, 1), state)
        actual = reference.dequantize(codes, absmax, shape=shape, dtype=dtype, order="bitsandbytes")
        np.testing.assert_array_equal(actual.astype(jnp.float32), expected.float().numpy().reshape(shape))


def all_dtypes(decode):
    """One compilation for the three dtypes."""
    return jax.jit(lambda *arrays: [decode(*arrays, dtype) for dtype in DTYPES])


def references(codes, absmax, shape, order):
    return all_dtypes(lambda c, a, dtype: reference.dequantize(c, a, shape=shape, dtype=dtype, order=order))(
        codes, absmax
    )


@pytest.mark.parametrize("order", ["bitsandbytes", "split"])
@pytest.mark.parametrize("shape", ALL)
def test_xla_equals_reference(shape, order):
    codes, absmax = packed(shape)
    decode = all_dtypes(
        lambda c, a, dtype: nf4.dequantize(c, a, shape=shape, dtype=dtype, order=order, implementation="xla")
    )
    expected = references(codes, absmax, shape, order)
    jax.tree.map(assert_bit_equal, decode(codes, absmax), expected)
    unpadded = -(-shape[0] * shape[1] // 2)
    if order == "bitsandbytes" and unpadded < codes.size:
        jax.tree.map(assert_bit_equal, decode(codes[:unpadded], absmax), expected)


def test_another_map():
    codes, absmax = packed((7, 13))
    quant_map = jnp.asarray(np.random.default_rng(1).standard_normal(16), jnp.float32)
    arguments = {"shape": (7, 13), "dtype": jnp.float32, "order": "bitsandbytes", "quant_map": quant_map}
    assert_bit_equal(nf4.dequantize(codes, absmax, **arguments), reference.dequantize(codes, absmax, **arguments))


@pytest.mark.parametrize("blocks", [None, 32], ids=str)
@pytest.mark.parametrize("shape", WHOLE)
def test_triton_interpreted_equals_reference(shape, blocks):
    codes, absmax = packed(shape)

    def decode(c, a, dtype):
        tile = min(blocks or config.triton_blocks(dtype), num_blocks(shape))
        return triton.dequantize(c.reshape(-1, 32), a, dtype=dtype, tile=tile, interpret=True).reshape(shape)

    expected = references(codes, absmax, shape, "split")
    jax.tree.map(assert_bit_equal, all_dtypes(decode)(codes, absmax), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", WHOLE)
def test_mosaic_interpreted_equals_reference(shape, dtype):
    codes, absmax = packed(shape)
    small = min(32, num_blocks(shape))
    with mosaic_interpreter() as interpret:
        decoded = mosaic_sm90.dequantize(codes.reshape(-1, 32), absmax, dtype=dtype, tile=small, interpret=interpret)
    expected = reference.dequantize(codes, absmax, shape=shape, dtype=dtype, order="split")
    assert_bit_equal(decoded.reshape(shape), expected)


def test_no_gradient_flows_to_the_packed_weight():
    codes, absmax = packed((2, 64))
    gradient = jax.grad(lambda a: nf4.dequantize(codes, a, shape=(2, 64), dtype=jnp.float32).sum())(absmax)
    assert not gradient.any()


def test_bad_arguments_are_named():
    codes, absmax = packed((4, 64))
    good = {"shape": (4, 64), "dtype": jnp.bfloat16}
    with pytest.raises(ValueError, match="codes of a 4×64 matrix must be 128 uint8"):
        nf4.dequantize(codes[1:], absmax, **good)
    with pytest.raises(ValueError, match="absmax of a 4×64 matrix must be 4 float32.*got uint8.*dequantize_absmax"):
        nf4.dequantize(codes, absmax.astype(jnp.uint8), **good)
    with pytest.raises(ValueError, match="order must be one of"):
        nf4.dequantize(codes, absmax, **good, order="interleaved")
    with pytest.raises(ValueError, match="dtype must be bfloat16, float16 or float32, got int8"):
        nf4.dequantize(codes, absmax, shape=(4, 64), dtype=jnp.int8)
    with pytest.raises(ValueError, match="shape must be .out, in."):
        nf4.dequantize(codes, absmax, shape=(0, 64), dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match=r"quant_map must be float32\[16\]"):
        nf4.dequantize(codes, absmax, **good, quant_map=jnp.zeros(15))


def test_a_forced_kernel_never_becomes_another():
    codes, absmax = packed((4, 64))
    if jax.default_backend() == "cpu":
        with pytest.raises(NotImplementedError, match="mosaic.*the target is cpu"):
            nf4.dequantize(codes, absmax, shape=(4, 64), dtype=jnp.bfloat16, implementation="mosaic")
    with pytest.raises(ValueError, match="one of 'mosaic', 'triton', 'xla'"):
        nf4.dequantize(codes, absmax, shape=(4, 64), dtype=jnp.bfloat16, implementation="cudnn")


def test_a_map_equal_to_nf4s_own_is_no_other_map():
    codes, absmax = packed((4, 64))
    own = nf4.dequantize(codes, absmax, shape=(4, 64), dtype=jnp.bfloat16, quant_map=jnp.asarray(nf4.NF4_VALUES))
    assert own.dtype == ml_dtypes.bfloat16
    assert_bit_equal(own, nf4.dequantize(codes, absmax, shape=(4, 64), dtype=jnp.bfloat16))
