"""Codes and scales against bitsandbytes, bit for bit; packing and unpacking without loss."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convert.formats import nf4 as nf4_file
from pallas_kernels import nf4
from pallas_kernels.nf4 import reference
from tests.support.matrices import IRREGULAR, WHOLE_ROWS

SHAPES = [pytest.param(matrix.shape, id=matrix.name) for matrix in WHOLE_ROWS + IRREGULAR]
DTYPES = ["float32", "bfloat16", "float16"]


def weights(shape, dtype, seed=0):
    drawn = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return jnp.asarray(drawn).astype(dtype)


def to_torch(array):
    import torch

    wide = torch.from_numpy(np.asarray(array.astype(jnp.float32)).copy())
    return wide.to(getattr(torch, array.dtype.name))


def test_a_program_with_many_matrices_of_a_shape_has_one_copy():
    """The mean of the scales is a long program, and a quantisation-aware step has dozens of it."""

    def both(matrices):
        return [nf4.quantize_absmax(nf4.quantize(matrix)[1]) for matrix in matrices]

    text = jax.jit(both).lower([weights((3, 70), "float32", seed) for seed in range(3)]).as_text()
    for name in ("quantize", "quantize_absmax"):
        assert text.count(f"func.func private @{name}(") == 1 and text.count(f"call @{name}(") == 3


@pytest.mark.torch
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_codes_and_scales_equal_bitsandbytes(bitsandbytes, shape, dtype):
    weight = weights(shape, dtype).at[0, 0].set(0)
    expected, state = bitsandbytes.quantize_4bit(to_torch(weight), quant_type="nf4")
    codes, absmax = jax.jit(nf4.quantize)(weight)
    np.testing.assert_array_equal(codes, expected.numpy().reshape(-1))
    np.testing.assert_array_equal(absmax, state.absmax.numpy())


@pytest.mark.torch
def test_blocks_of_zeros_equal_bitsandbytes(bitsandbytes):
    weight = weights((3, 70), "float32").at[0].set(0).at[2, 40:].set(0)
    expected, state = bitsandbytes.quantize_4bit(to_torch(weight), quant_type="nf4")
    codes, absmax = nf4.quantize(weight)
    np.testing.assert_array_equal(codes, expected.numpy().reshape(-1))
    np.testing.assert_array_equal(absmax, state.absmax.numpy())
    zeros, zero_absmax = nf4.quantize(jnp.zeros((2, 64)))
    decoded = nf4.dequantize(zeros, zero_absmax, shape=(2, 64), dtype=jnp.float32, order="bitsandbytes")
    assert not decoded.any()


@pytest.mark.torch
def test_ties_go_to_the_lower_code(bitsandbytes):
    middles = (nf4.NF4_VALUES[:-1] + nf4.NF4_VALUES[1:]) / np.float32(2)
    row = np.zeros((1, 64), np.float32)
    row[0, :16] = [1.0, *middles]
    row[0, 16:31] = np.nextafter(middles, np.float32(2))
    expected, _ = bitsandbytes.quantize_4bit(to_torch(jnp.asarray(row)), quant_type="nf4")
    codes, _ = nf4.quantize(jnp.asarray(row))
    np.testing.assert_array_equal(codes, expected.numpy().reshape(-1))
    np.testing.assert_array_equal(reference.unpack(codes, 31, "bitsandbytes")[1:16], range(15))
    np.testing.assert_array_equal(reference.unpack(codes, 31, "bitsandbytes")[16:], range(1, 16))


@pytest.mark.torch
@pytest.mark.parametrize("blocks", [1, 255, 256, 257, 5000])
def test_nested_scales_equal_bitsandbytes(bitsandbytes, blocks):
    import torch

    absmax = np.abs(np.random.default_rng(blocks).standard_normal(blocks)).astype(np.float32)
    offset = torch.from_numpy(absmax).mean()
    expected, state = bitsandbytes.quantize_blockwise(torch.from_numpy(absmax) - offset, blocksize=256)
    quantized, nested_absmax, own_offset = jax.jit(nf4.quantize_absmax)(absmax, np.float32(offset))
    np.testing.assert_array_equal(quantized, expected.numpy())
    np.testing.assert_array_equal(nested_absmax, state.absmax.numpy())
    np.testing.assert_array_equal(nf4.DYNAMIC_MAP, bitsandbytes.create_dynamic_map().numpy())
    assert own_offset == offset.item()
    # The mean itself is the same but for the order of its additions: a few units in the last place.
    np.testing.assert_allclose(nf4.quantize_absmax(jnp.asarray(absmax))[2], offset.item(), rtol=1e-6)
    decoded = jax.jit(nf4.dequantize_absmax)(quantized, nested_absmax, nf4.DYNAMIC_MAP, own_offset)
    np.testing.assert_array_equal(decoded, (bitsandbytes.dequantize_blockwise(expected, state) + offset).numpy())


@pytest.mark.parametrize("blocks", [1, 2, 15, 16, 17, 255, 256, 257, 4097, 114_688])
@pytest.mark.parametrize("seed", range(3))
def test_both_quantisers_take_the_same_mean_to_the_bit(blocks, seed):
    """And that is the exact sum, rounded and divided; a sum in any order and float32 is so in half of the cases."""
    rng = np.random.default_rng([blocks, seed])
    scales = np.exp(rng.normal(-4, 2, blocks)).astype(np.float32)
    exact = np.float32(np.float32(math.fsum(scales.tolist())) / np.float32(blocks))
    assert nf4_file.mean(scales) == exact
    assert np.array_equal(jax.jit(nf4.mean)(scales), exact)


def test_a_mean_of_large_scales_does_not_overflow():
    scales = np.full(70_000, 3e38, np.float32)
    assert nf4_file.mean(scales) == jax.jit(nf4.mean)(scales) == np.float32(3e38)


def test_nested_scales_are_rounded_after_the_product_and_after_the_sum():
    """XLA would contract the two to one instruction with one rounding: a third of these would differ."""
    rng = np.random.default_rng(0)
    quantized = rng.integers(0, 256, (512, 1024), dtype=np.uint8)
    nested_absmax = rng.random(2048, dtype=np.float32)
    offset = np.float32(0.7)
    expected = nf4.DYNAMIC_MAP[quantized.reshape(-1, 256)] * nested_absmax[:, None] + offset
    decoded = jax.jit(nf4.dequantize_absmax)(quantized, nested_absmax, nf4.DYNAMIC_MAP, offset)
    assert decoded.shape == quantized.shape
    np.testing.assert_array_equal(np.asarray(decoded).reshape(-1, 256), expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_quantising_a_decoded_weight_changes_nothing(shape):
    quantize = jax.jit(nf4.quantize)
    decode = jax.jit(functools.partial(nf4.dequantize, shape=shape, dtype=jnp.float32, order="bitsandbytes"))
    codes, absmax = quantize(weights(shape, "float32"))
    again, absmax_again = quantize(decode(codes, absmax))
    np.testing.assert_array_equal(again, codes)
    np.testing.assert_array_equal(absmax_again, absmax)


def test_reordering_is_lossless_both_ways():
    codes = np.random.default_rng(0).integers(0, 256, (6, 96), dtype=np.uint8)
    split = nf4.reorder(jnp.asarray(codes), "bitsandbytes", "split")
    assert split.shape == codes.shape
    elements = reference.unpack(jnp.asarray(codes), codes.size * 2, "bitsandbytes")
    np.testing.assert_array_equal(reference.unpack(split, codes.size * 2, "split"), elements)
    np.testing.assert_array_equal(nf4.reorder(split, "split", "bitsandbytes"), codes)
    np.testing.assert_array_equal(nf4.reorder(split, "split", "split"), split)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="weight must be .out, in. in float32, float16 or bfloat16, got int32"):
        nf4.quantize(jnp.zeros((2, 64), jnp.int32))
    with pytest.raises(ValueError, match="to must be one of"):
        nf4.reorder(jnp.zeros(32, jnp.uint8), "split", "interleaved")
    with pytest.raises(ValueError, match="whole blocks of 32 bytes"):
        nf4.reorder(jnp.zeros(33, jnp.uint8), "bitsandbytes", "split")
    with pytest.raises(ValueError, match="300 codes need 2 nested scales"):
        nf4.dequantize_absmax(jnp.zeros(300, jnp.uint8), jnp.zeros(1), jnp.asarray(nf4.DYNAMIC_MAP), jnp.float32(0))
