"""NF4 to float8: every implementation against the definition, bit for bit, in both orientations."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import dispatch, nf4
from pallas_kernels.float8 import scale_of
from pallas_kernels.nf4 import config, triton, triton_float8
from pallas_kernels.nf4.implementations import FLOAT8, Decode, Float8
from pallas_kernels.nf4.shapes import BENCHMARK, LLAMA_8B
from tests.support import resources
from tests.support.aot import AOT, needs_cuda_plugin

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


def assert_same(found, expected, name=""):
    for ours, theirs in zip(found, expected, strict=True):
        kind = f"uint{8 * theirs.dtype.itemsize}"
        np.testing.assert_array_equal(np.asarray(ours).view(kind), theirs.view(kind), err_msg=name)


@pytest.mark.parametrize("transposed", [False, True])
def test_the_kernels_equal_the_definition(transposed):
    codes, absmax = packed(SHAPE)
    expected = by_definition(codes, absmax, transposed)
    assert_same(nf4.dequantize_float8(codes, absmax, shape=SHAPE, transposed=transposed), expected)
    scaled = (
        absmax
        * np.asarray(scale_of(jnp.asarray(absmax.max(axis=0 if transposed else 1)))[1])[
            None if transposed else slice(None), slice(None) if transposed else None
        ]
    )
    if transposed:
        sizes = config.TransposedConfig(64, 4)
        found = triton_float8.dequantize_transposed(codes, scaled.T, shape=SHAPE, config=sizes, interpret=True)
    else:
        options = {"dtype": jnp.float8_e4m3fn, "config": config.triton_config(jnp.float8_e4m3fn), "interpret": True}
        found = triton.dequantize(codes.reshape(-1, 32), scaled.reshape(-1), **options).reshape(SHAPE)
    assert_same([found], expected[:1])


def test_blocks_that_cross_rows_are_refused():
    with pytest.raises(ValueError, match="expected rows of whole blocks of 64, got 64×96"):
        nf4.dequantize_float8(jnp.zeros(3072, jnp.uint8), jnp.ones(96), shape=(64, 96))


@pytest.mark.aot
@needs_cuda_plugin
@pytest.mark.newer_world
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
@pytest.mark.newer_world
def test_mosaic_for_hopper(tmp_path, monkeypatch):
    aot, (out, columns) = AOT("h200"), BENCHMARK.shape

    def decode(codes, absmax):
        return nf4.dequantize_float8(codes, absmax, shape=BENCHMARK.shape, implementation="mosaic")

    specs = aot.spec((out, columns // 2), jnp.uint8), aot.spec((out, columns // 64), jnp.float32)
    used = resources.of_mosaic(aot, decode, *specs, folder=tmp_path, monkeypatch=monkeypatch)
    assert used.spill_bytes == used.stack_bytes == 0 and used.registers <= 48


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [pytest.param(matrix.shape, id=matrix.name) for matrix in LLAMA_8B])
def test_every_implementation_on_the_card_is_bit_equal(shape, transposed):
    codes, absmax = packed(shape)
    expected = by_definition(codes, absmax, transposed)
    case = Float8(Decode(dispatch.target(), shape, jnp.float8_e4m3fn, None, "split", True), transposed)
    for name in [name for name, reason in FLOAT8.reasons(case).items() if reason is None]:
        options = {"shape": shape, "transposed": transposed, "implementation": name}
        assert_same(jax.jit(lambda c, a, o=options: nf4.dequantize_float8(c, a, **o))(codes, absmax), expected, name)
