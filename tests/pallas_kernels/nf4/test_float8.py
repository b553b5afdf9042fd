"""NF4 to float8: every implementation against the definition, bit for bit, in both orientations."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import nf4
from pallas_kernels.nf4 import config, mosaic_sm90, triton, triton_float8, triton_scales
from pallas_kernels.nf4.implementations import FLOAT8
from tests.support import resources
from tests.support.aot import AOT, needs_cuda_plugin
from tests.support.close import assert_bit_equal
from tests.support.interpreter import mosaic_interpreter
from tests.support.matrices import BENCHMARK, LLAMA_8B

SHAPE = (128, 192)


def packed(shape, seed=0):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (shape[0], shape[1] // 2), dtype=np.uint8)
    return codes, np.exp(rng.normal(-4, 2, (shape[0], shape[1] // 64))).astype(np.float32)


def by_definition(codes, absmax, transposed):
    """The float32 values over the scales, rounded once by NumPy; scales from the largest block of a row or column."""
    blocks = codes.reshape(*absmax.shape, 32)
    nibbles = np.concatenate([blocks & 15, blocks >> 4], axis=-1)
    largest = absmax.max(axis=0) if transposed else absmax.max(axis=1)
    scales = np.exp2(np.ceil(np.log2(largest.astype(np.float64) / 448))).astype(np.float32)
    assert (largest / scales <= 448).all() and (largest / scales > 224).all()
    values = nf4.NF4_VALUES[nibbles] * absmax[..., None]
    matrix = (values.reshape(codes.shape[0], -1) / (np.repeat(scales, 64) if transposed else scales[:, None])).astype(
        ml_dtypes.float8_e4m3fn
    )
    return (matrix.T, np.repeat(scales, 64)) if transposed else (matrix, scales)


def largest_by_definition(absmax, parts):
    """Bits of the maxima of equal parts of the rows, the last ones shorter or empty."""
    out, blocks = absmax.shape
    size = -(-out // parts)
    padded = np.zeros((parts * size, blocks), np.float32)
    padded[:out] = absmax
    return np.ascontiguousarray(padded.reshape(parts, size, blocks).max(axis=1).T).view(np.int32)


def assert_same(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert_bit_equal(ours, theirs)


@pytest.mark.parametrize("transposed", [False, True])
def test_the_definition(transposed):
    codes, absmax = packed(SHAPE)
    found = nf4.dequantize_float8(codes, absmax, shape=SHAPE, transposed=transposed)
    assert_same(found, by_definition(codes, absmax, transposed))


@pytest.mark.parametrize("transposed", [False, True])
def test_triton_equals_the_definition(transposed):
    codes, absmax = packed(SHAPE)
    expected, scales = by_definition(codes, absmax, transposed)
    if transposed:
        scaled = (absmax / scales[None, ::64]).T
        found = triton_float8.dequantize_transposed(codes, scaled, shape=SHAPE, rows=64, interpret=True)
    else:
        scaled = absmax / scales[:, None]
        options = {"dtype": jnp.float8_e4m3fn, "tile": config.triton_blocks(jnp.float8_e4m3fn), "interpret": True}
        found = triton.dequantize(codes.reshape(-1, 32), scaled.reshape(-1), **options).reshape(SHAPE)
    assert_same([found], [expected])


# Tiles that end with the matrix and tiles moved back, parts beyond the first 32, a scale of each tile of columns.
@pytest.mark.parametrize(
    ("shape", "parts"),
    [((128, 256), 32), ((140, 320), 64), ((264, 576), 32)],
)
def test_mosaic_transposed_equals_the_definition(shape, parts):
    codes, absmax = packed(shape)
    largest = largest_by_definition(absmax, parts)
    with mosaic_interpreter() as interpret:
        found = mosaic_sm90.dequantize_transposed(codes, absmax.T, largest, interpret=interpret)
    assert_same(found, by_definition(codes, absmax, True))


@pytest.mark.parametrize("shape", [(1, 64), (37, 192), (128, 576)])
def test_scales_of_rows(shape):
    _, absmax = packed(shape)
    _, scales = by_definition(np.zeros((shape[0], shape[1] // 2), np.uint8), absmax, False)
    found = triton_scales.scale_rows(absmax, interpret=True)
    assert_same(found, (absmax / scales[:, None], scales))


@pytest.mark.parametrize("shape", [(1, 64), (37, 192), (500, 2560)])
def test_transposed_absmax_and_largest_of_parts(shape):
    _, absmax = packed(shape)
    found = triton_scales.transpose_and_largest(absmax, interpret=True)
    assert_same(found, [absmax.T, largest_by_definition(absmax, 128)])


@pytest.mark.parametrize("transposed", [False, True])
def test_scales_that_are_not_finite(transposed):
    """Infinite for NaN of either sign and for infinity, whatever a device makes of NaN in a maximum."""
    codes, absmax = packed((128, 256))
    absmax[3, 0], absmax[5, 1], absmax[7, 2] = np.nan, np.inf, -np.nan
    rows = triton_scales.scale_rows(absmax, interpret=True)[1]
    _, largest = triton_scales.transpose_and_largest(absmax, interpret=True)
    columns = jnp.repeat(triton_scales.scales_of(jnp.max(largest, axis=1))[0], 64)
    _, scales = nf4.dequantize_float8(codes, absmax, shape=(128, 256), transposed=transposed)
    assert_same([scales], [np.asarray(columns if transposed else rows)])
    infinite = {0, 1, 2} if transposed else {3, 5, 7}
    assert set(np.flatnonzero(np.isinf(scales[::64] if transposed else scales)).tolist()) == infinite


def test_blocks_that_cross_rows_are_refused():
    with pytest.raises(ValueError, match="expected rows of whole blocks of 64, got 64×96"):
        nf4.dequantize_float8(jnp.zeros(3072, jnp.uint8), jnp.ones(96), shape=(64, 96))


@pytest.mark.aot
@needs_cuda_plugin
@pytest.mark.parametrize("transposed", [False, True])
def test_triton_for_hopper(transposed, tmp_path):
    aot, (out, columns) = AOT("h200"), BENCHMARK.shape

    def decode(codes, absmax):
        options = {"shape": BENCHMARK.shape, "transposed": transposed, "implementation": "triton"}
        return nf4.dequantize_float8(codes, absmax, **options)

    specs = aot.spec((out, columns // 2), jnp.uint8), aot.spec((out, columns // 64), jnp.float32)
    used = resources.of_triton(aot, decode, *specs, folder=tmp_path)
    assert used is None or (
        used.spill_bytes == used.stack_bytes == 0 and used.registers <= 80
    )  # six programs of four warps at a time


@pytest.mark.aot
@needs_cuda_plugin
@pytest.mark.exhaustive("True-96")
@pytest.mark.parametrize(("transposed", "registers"), [(False, 48), (True, 96)])  # transposed, five thread blocks
def test_mosaic_for_hopper(transposed, registers, tmp_path, monkeypatch):
    aot, (out, columns) = AOT("h200"), BENCHMARK.shape

    def decode(codes, absmax):
        options = {"shape": BENCHMARK.shape, "transposed": transposed, "implementation": "mosaic"}
        return nf4.dequantize_float8(codes, absmax, **options)

    specs = aot.spec((out, columns // 2), jnp.uint8), aot.spec((out, columns // 64), jnp.float32)
    used = resources.of_mosaic(aot, decode, *specs, folder=tmp_path, monkeypatch=monkeypatch)
    assert used.spill_bytes == used.stack_bytes == 0 and used.registers <= registers


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [*(pytest.param(matrix.shape, id=matrix.name) for matrix in LLAMA_8B), (396, 832)])
def test_every_implementation_on_the_card_is_bit_equal(shape, transposed):
    codes, absmax = packed(shape)
    expected = by_definition(codes, absmax, transposed)
    reasons = FLOAT8.reasons(shape=shape, transposed=transposed)
    for name in [name for name, reason in reasons.items() if reason is None]:
        options = {"shape": shape, "transposed": transposed, "implementation": name}
        assert_same(jax.jit(lambda c, a, o=options: nf4.dequantize_float8(c, a, **o))(codes, absmax), expected)
