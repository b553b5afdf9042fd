"""The dynamic maps and their codes, against bitsandbytes where it is installed and against a search."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convert.formats.dynamic import dynamic_map
from fastjax.training.optimizers.blockwise import BLOCK, Blockwise, block_absmax, dequantize, quantize, zeros


@jax.jit
def _signed(array):
    return quantize(array, block_absmax(array, 1), signed=True)


@jax.jit
def _unsigned(array):
    return quantize(array, block_absmax(array, 1), signed=False)


def encode(values, signed):
    """Codes of values in [-1, 1], each block of which begins with a 1 and so has scale 1."""
    padded = np.zeros(-(-values.size // (BLOCK - 1)) * (BLOCK - 1), np.float32)
    padded[: values.size] = values
    blocks = np.concatenate([np.ones((padded.size // (BLOCK - 1), 1), np.float32), padded.reshape(-1, BLOCK - 1)], 1)
    found = (_signed if signed else _unsigned)(jnp.asarray(blocks))
    assert np.all(found.absmax == 1)
    return np.asarray(found.codes)[:, 1:].reshape(-1)[: values.size].astype(int)


@pytest.mark.torch
@pytest.mark.parametrize("signed", [True, False])
def test_the_maps_are_bitsandbytes(signed):
    bnb = pytest.importorskip("bitsandbytes.functional")
    assert np.array_equal(bnb.create_dynamic_map(signed=signed).numpy(), dynamic_map(signed))


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_the_nearest(signed):
    rng = np.random.default_rng(0)
    values = dynamic_map(signed)
    middles, widths = (values[:-1] + values[1:]) / np.float32(2), np.diff(values)
    near = [values, middles + 2e-5 * widths, middles - 2e-5 * widths, np.nextafter(middles, np.float32(2)), middles]
    spread = [rng.uniform(-1, 1, 10**5), 10.0 ** rng.uniform(-9, 0, 10**5) * rng.choice([-1, 1], 10**5)]
    x = np.clip(np.concatenate([*near, *spread, [0.0, -0.0, 1.0, -1.0]]).astype(np.float32), -1, 1)
    x = x if signed else np.abs(x)
    expected, found = np.searchsorted(middles, x), encode(x, signed)
    # Borders are computed in float32: one may be off by 1e-5 of the distance of its neighbours.
    other = expected != found
    border = np.minimum(expected, found)[other]
    assert np.all(np.abs(expected - found) <= 1)
    assert np.all(np.abs(x[other] - middles[border]) <= 1e-5 * widths[border])
    assert other.sum() < 2e-5 * x.size + 2 * middles.size  # besides the borders themselves next to none


@pytest.mark.parametrize("signed", [True, False])
def test_values_of_the_map_come_back(signed):
    array = jnp.asarray(dynamic_map(signed)[None])
    quantized = quantize(array, block_absmax(array, 1), signed=signed)
    assert np.array_equal(quantized.codes[0], np.arange(256))
    assert np.array_equal(dequantize(quantized, signed=signed), array)


def test_blocks_end_with_the_layer():
    """Three layers of 300 elements: two blocks each, the second short, and none sees another layer."""
    rng = np.random.default_rng(1)
    array = rng.standard_normal((3, 20, 15)).astype(np.float32) * np.array([1, 100, 1e-4], np.float32)[:, None, None]
    absmax = block_absmax(jnp.asarray(array), 1)
    flat = np.abs(array.reshape(3, 300))
    assert np.array_equal(absmax, np.stack([flat[:, :256].max(1), flat[:, 256:].max(1)], axis=1))
    whole = quantize(jnp.asarray(array), absmax, signed=True)
    assert whole.codes.shape == array.shape
    for layer in range(3):
        one = jnp.asarray(array[layer])
        alone = quantize(one, block_absmax(one, 0), signed=True)
        assert np.array_equal(alone.codes, whole.codes[layer])
        assert np.array_equal(alone.absmax, absmax[layer])
    # Within half the widest gap of the map, 0.9/64, of the largest in the block.
    error = np.abs(np.asarray(dequantize(whole, signed=True)) - array).reshape(3, 300)
    assert np.all(error <= np.repeat(np.asarray(absmax), [256, 44], axis=1) * (0.45 / 64 + 1e-6))


@pytest.mark.parametrize("signed", [True, False])
def test_zeros(signed):
    start = zeros((2, 30, 10), 1)
    assert isinstance(start, Blockwise)
    assert start.absmax.shape == (2, 2)
    assert not np.any(dequantize(start, signed=signed))
    array = jnp.zeros((2, 300))
    assert not np.any(dequantize(quantize(array, block_absmax(array, 1), signed=signed), signed=signed))
