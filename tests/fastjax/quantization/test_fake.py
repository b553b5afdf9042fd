"""Fake quantisers have the values of each format's definition, written down here in numpy, to the bit."""

import typing

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from convert.formats import mxfp4, nf4
from fastjax.quantization.fake import ACTIVATIONS, GGML, WEIGHTS, fake_quantize
from fastjax.training.config.qat import NAMED, QATActivations, QATWeights

E2M1 = ml_dtypes.float4_e2m1fn


def hostile(seed=0):
    """Rows of very different sizes, zeros, subnormal numbers, ties, outliers, one sign."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((192, 256)) * np.exp(2 * rng.standard_normal((192, 1)))
    w[3], w[4, :32], w[5, ::7], w[6] = 0, 1e-40, 100 * w[5, ::7], 1e-30
    w[7], w[8], w[9], w[10, :32] = np.abs(w[7]), -np.abs(w[8]), np.round(4 * w[9]) / 4, np.arange(32) - 16
    return w.astype(np.float32)


def scale_of(largest, steps, dtype):
    scale = (largest / np.float32(steps)).astype(dtype).astype(np.float32)
    return np.where(scale < 2.0**-90, np.float32(ml_dtypes.finfo(dtype).eps), scale)


def integers(w, group, low, high, dtype, zero_points=False):
    table = w.reshape(len(w), -1, group)
    if zero_points:
        least, most = np.minimum(table.min(2, keepdims=True), 0), np.maximum(table.max(2, keepdims=True), 0)
        scale = scale_of(most - least, high - low, dtype)
        zero = np.rint(np.clip(low - least / scale, low, high))
    else:
        scale, zero = scale_of(np.abs(table).max(2, keepdims=True), (high - low) / 2, dtype), np.float32(0)
    return ((np.rint(np.clip(table / scale + zero, low, high)) - zero) * scale).reshape(w.shape)


def fp8(w, block, dtype):
    found = np.empty_like(w)
    for row in range(0, len(w), block[0]):
        for column in range(0, w.shape[1], block[1]):
            own = w[row : row + block[0], column : column + block[1]]
            scale = scale_of(np.abs(own).max(), 448, dtype)
            codes = np.clip(own / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
            found[row : row + block[0], column : column + block[1]] = codes * scale
    return found


def nvfp4(w, top):
    table = w.reshape(len(w), -1, 16)
    whole = np.where(top < 2.0**-90, np.float32(1), np.float32(2688) / np.maximum(top, np.float32(2.0**-90)))
    own = np.minimum(whole * (np.abs(table).max(2, keepdims=True) / np.float32(6)), 448)
    own = own.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    scale = np.where(own == 0, np.float32(0.125), own) / whole
    return (np.clip(table / scale, -6, 6).astype(E2M1).astype(np.float32) * scale).reshape(w.shape)


def through_nf4(w, dtype):
    tensor = nf4.nest(nf4.encode(w.astype(dtype)))
    return nf4.decode(tensor).astype(np.float32)


def through_mxfp4(w):
    tensor = mxfp4.encode(w[None])
    return mxfp4.decode(tensor.codes, tensor.scales)[0]


@jax.jit
def through_every_format(w, top):
    """By the schemes themselves, which adapters' products call, and as activations are quantised."""
    weights = {name: scheme(w, top, jnp.bfloat16)[0] for name, scheme in WEIGHTS.items()}
    return weights | {f"{name} of activations": fake_quantize(w, scheme) for name, scheme in ACTIVATIONS.items()}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(value):
    """No code hides it: a loss over it is not finite, and the step is not taken."""
    w = hostile()
    top = np.abs(w).max()  # of a maximum that has passed over NaN
    w[20, 37] = value
    for name, found in through_every_format(w, top).items():
        assert np.isnan(found[20, 37]), name


def ggml(w, kind, dtype):
    """The gguf library's values of a folder in a dtype."""
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[kind.upper()]
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):  # reciprocals of scales that become zero
        return gguf.dequantize(gguf.quantize(w.astype(dtype).astype(np.float32), kind), kind)


WEIGHTS_BY_DEFINITION = {
    "int4-32": lambda w, dtype: integers(w, 32, -8, 7, dtype),
    "int4-128": lambda w, dtype: integers(w, 128, -8, 7, dtype),
    "int4-32-zeros": lambda w, dtype: integers(w, 32, -8, 7, dtype, zero_points=True),
    "int4-128-zeros": lambda w, dtype: integers(w, 128, -8, 7, dtype, zero_points=True),
    "int8": lambda w, dtype: integers(w, 256, -128, 127, dtype),
    "fp8-row": lambda w, dtype: fp8(w, (1, 256), dtype),
    "fp8-tensor": lambda w, dtype: fp8(w, w.shape, dtype),
    "fp8-block": lambda w, dtype: fp8(w, (128, 128), dtype),
    "nf4": through_nf4,
    "mxfp4": lambda w, dtype: through_mxfp4(w),
    "nvfp4": lambda w, dtype: nvfp4(w, np.abs(w).max()),
    "q4_0": lambda w, dtype: ggml(w, "q4_0", np.float32),
    "q8_0": lambda w, dtype: ggml(w, "q8_0", np.float32),
}
ACTIVATIONS_BY_DEFINITION = {
    "int8": lambda x: integers(x, 256, -128, 127, np.float32),
    "fp8": lambda x: fp8(x, (1, 256), np.float32),
    "fp8-128": lambda x: fp8(x, (1, 128), np.float32),
    "nvfp4": lambda x: nvfp4(x, np.abs(x).max(1)[:, None, None]),
}


@pytest.mark.exhaustive("bfloat16")  # scales that are rounded too; activations have them in float32
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_weights_are_the_definitions(dtype):
    w = hostile()
    found = jax.jit(lambda w: {name: fake_quantize(w, scheme, dtype) for name, scheme in WEIGHTS.items()})(w)
    assert set(WEIGHTS) == set(WEIGHTS_BY_DEFINITION) == set(typing.get_args(QATWeights))
    for name, values in found.items():
        expected = WEIGHTS_BY_DEFINITION[name](w, dtype)
        # subnormal numbers may count as zero
        np.testing.assert_allclose(values, expected, rtol=0, atol=np.finfo(np.float32).tiny, err_msg=name)


def test_activations_are_the_definitions_token_by_token():
    x = hostile()
    found = jax.jit(lambda x: {name: fake_quantize(x, scheme) for name, scheme in ACTIVATIONS.items()})(x)
    assert set(ACTIVATIONS) == set(ACTIVATIONS_BY_DEFINITION) == set(typing.get_args(QATActivations))
    for name, values in found.items():
        np.testing.assert_array_equal(values, ACTIVATIONS_BY_DEFINITION[name](x), err_msg=name)
    assert all(each.weights in WEIGHTS and each.activations in (None, *ACTIVATIONS) for each in NAMED.values())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_ggml_rounds_the_folders_values_so(bits, dtype):
    """Ties between codes, largest numbers of both signs, scales that float16 has as subnormal or not at all."""
    rng = np.random.default_rng(7)
    w = rng.standard_normal((512, 256)) * np.exp2(rng.integers(-30, 4, (512, 1)))
    w[:64] = np.round(w[:64] * 64) / 64
    w[64:128] = rng.integers(-16, 17, (64, 256)) / 8
    w[128:160, ::32], w[128:160, 1::32] = 3, -3
    w[160:192] = hostile()[:32]
    w = w.astype(np.float32)
    found = jax.jit(lambda w: GGML(bits, dtype)(w, jnp.float32(0), jnp.float32)[0])(w)
    np.testing.assert_array_equal(found, ggml(w, f"q{bits}_0", dtype))


@pytest.mark.parametrize("name", ["int4-32", "mxfp4", "nvfp4"])
def test_gradients_pass_straight_through_clipped_at_the_range(name):
    """Against automatic differentiation of scale · clip(w / scale) with scales as constants, rounding left out."""
    w = jnp.asarray(hostile(1)[16:48])
    groups = {"int4-32": 32, "mxfp4": 32, "nvfp4": 16}[name]

    def scales(w):
        amax = np.abs(w).reshape(len(w), -1, groups).max(2, keepdims=True)
        if name == "int4-32":
            return amax / 7.5
        if name == "mxfp4":
            return np.exp2(np.floor(np.log2(amax)) - 2)
        whole = np.float32(2688) / np.abs(w).max()
        own = np.minimum(whole * (amax / np.float32(6)), 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        return own / whole

    scale, limit = scales(np.asarray(w)), 7.5001 if name == "int4-32" else 6.000001

    def clipped(w):
        return (jnp.clip(w.reshape(*scale.shape[:2], groups) / scale, -limit, limit) * scale).reshape(w.shape)

    dy = jnp.asarray(np.random.default_rng(2).standard_normal(w.shape), jnp.float32)
    expected = jax.vjp(clipped, w)[1](dy)[0]
    found = jax.vjp(lambda w: fake_quantize(w, WEIGHTS[name]), w)[1](dy)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert (np.asarray(found) == 0).any() == (name != "int4-32")
