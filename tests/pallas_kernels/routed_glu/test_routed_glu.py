"""The gated block of routed rows: interpreted, compiled, on the card, against its definition in float64."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.routed_glu import REGISTRY, gradients, mosaic_sm90, routed_glu
from tests.support import resources
from tests.support.aot import AOT, needs_cuda_plugin
from tests.support.interpreter import mosaic_interpreter

#: One rounding of a result of float32, and float32's own: of the largest value.
TOLERANCE = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 1e-6}
QWEN = {"activation": "silu"}
OSS = {"activation": "silu", "clamp": (7.0, 1.702)}


def draw(rows, width, dtype, computed, seed):
    """[gate | up], dh and weights; rows that no kernel may read are NaN."""
    rng = np.random.default_rng(seed)
    shapes = (rows, 2 * width), (rows, width)
    arrays = [rng.standard_normal(shape) for shape in shapes] + [rng.random(rows)]
    for array in arrays:
        array[computed:] = np.nan
    return [jnp.asarray(array, kind) for array, kind in zip(arrays, (dtype, dtype, "float32"), strict=True)]


def exact(gate_up, dh, weights, clamp=None, **_):
    """(h, dgate_up, dweights) of every row in float64."""
    (gate, up), dh = np.split(np.asarray(gate_up, np.float64), 2, axis=1), np.asarray(dh, np.float64)
    back, alpha, inside = dh * np.asarray(weights, np.float64)[:, None], 1.0, np.ones_like(gate)
    within = np.ones_like(up)
    if clamp:
        limit, alpha = clamp
        inside, within = gate <= limit, np.abs(up) <= limit
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit) + 1
    sigmoid = 1 / (1 + np.exp(-alpha * gate))
    act = gate * sigmoid
    slope = sigmoid + alpha * act * (1 - sigmoid)
    dgate_up = np.concatenate([back * up * slope * inside, back * act * within], axis=1)
    return act * up, dgate_up, np.sum(dh * act * up, axis=1)


def assert_close(found, expected, dtype, rows):
    for ours, theirs in zip(found, expected, strict=True):
        difference = np.abs(np.asarray(ours[:rows], np.float64) - theirs[:rows])  # what is behind may be anything
        # Sums of a row are float32, of factors in 16 bits; where XLA makes them, of h after its rounding.
        assert np.max(difference) <= TOLERANCE[dtype] * np.abs(theirs[:rows]).max(), ours.shape


@pytest.mark.parametrize("options", [QWEN, OSS], ids=["silu", "clamped"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_definition(dtype, options):
    operands = draw(64, 128, dtype, 64, 0)
    h = routed_glu(operands[0], jnp.int32(64), **options)
    again, *others = gradients(*operands, jnp.int32(64), **options)
    assert bool(jnp.array_equal(h, again)) and others[1].dtype == jnp.float32
    assert_close((h, *others), exact(*operands, **options), dtype, 64)


def test_shapes_that_do_not_fit_are_refused():
    gate_up, dh, weights = draw(64, 128, "float32", 64, 0)
    with pytest.raises(ValueError, match=r"expected gate_up \[M, 2F\], given \[64, 255\]"):
        routed_glu(gate_up[:, 1:], jnp.int32(64), **QWEN)
    with pytest.raises(ValueError, match=r"expected dh \[64, 128\] .* given \[64, 64\] in float32 and \[64\]"):
        gradients(gate_up, dh[:, :64], weights, jnp.int32(64), **QWEN)
    with pytest.raises(ValueError, match="activation must be one of"):
        routed_glu(gate_up, jnp.int32(64), activation="nothing")


# The last tile is moved back where rows are no whole tiles; 70 rows take three tiles.
@pytest.mark.parametrize(("rows", "computed"), [(104, 70), (100, 100), (32, 1), (64, 0)])
def test_interpreted(rows, computed):
    tiles = min(rows, -(-computed // mosaic_sm90.ROWS) * mosaic_sm90.ROWS)
    operands = draw(rows, 128, "float16", tiles, rows)
    with mosaic_interpreter(num_cores=1) as interpret:
        h = mosaic_sm90.forward(operands[0], jnp.int32(computed), interpret=interpret)
        found = mosaic_sm90.gradients(*operands, jnp.int32(computed), interpret=interpret)
    if computed:
        assert_close((h, *found), (exact(*operands)[0], *exact(*operands)), "float16", computed)
    assert not any(np.asarray(array, np.float32)[tiles:].any() for array in (h, *found))  # they are not written


@needs_cuda_plugin
def test_refusals_say_why():
    facts = {"dtype": "bfloat16", "shape": (64, 256), "activation": "silu", "clamp": None}
    with AOT().tracing():
        assert REGISTRY.reasons(**facts)["mosaic"] is None
        for other, reason in {
            "dtype": ("float32", "bfloat16 or float16, not float32"),
            "shape": ((64, 192), "whole tiles of 64"),
            "activation": ("gelu", "silu without clamp, not gelu"),
            "clamp": ((7.0, 1.7), "not clamped_swiglu"),
        }.items():
            assert reason[1] in (REGISTRY.reasons(**facts | {other: reason[0]})["mosaic"] or "")


@pytest.mark.aot
@needs_cuda_plugin
@pytest.mark.parametrize(("backward", "registers"), [(False, 64), (True, 128)])
def test_compiled_for_hopper_without_spills(backward, registers, tmp_path, monkeypatch):
    aot, (rows, width) = AOT("h200"), (65536, 768)
    specs = [aot.spec((rows, 2 * width), jnp.bfloat16), aot.spec((), jnp.int32)]
    if backward:
        specs[1:1] = [aot.spec((rows, width), jnp.bfloat16), aot.spec((rows,), jnp.float32)]

    def call(*operands):
        return (gradients if backward else routed_glu)(*operands, **QWEN, implementation="mosaic")

    used = resources.of_mosaic(aot, call, *specs, folder=tmp_path, monkeypatch=monkeypatch)
    assert used.spill_bytes == used.stack_bytes == 0 and used.registers <= registers


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("rows", "width", "computed"), [(65536, 768, 16420), (3000, 1408, 3000), (1000, 64, 1)])
def test_on_the_card(rows, width, computed, dtype):
    if reason := REGISTRY.reasons(dtype=dtype, shape=(rows, 2 * width), activation="silu", clamp=None)["mosaic"]:
        pytest.skip(reason)
    tiles = min(rows, -(-computed // mosaic_sm90.ROWS) * mosaic_sm90.ROWS)
    operands = draw(rows, width, dtype, tiles, time.time_ns())
    jax.block_until_ready([jnp.full((rows, 2 * width), jnp.nan, dtype) for _ in range(2)])
    h = routed_glu(operands[0], jnp.int32(computed), **QWEN)
    found = gradients(*operands, jnp.int32(computed), **QWEN)
    assert_close((h, *found), (exact(*operands)[0], *exact(*operands)), dtype, computed)
    again = gradients(*operands, jnp.int32(computed), **QWEN)
    assert all(bool(jnp.array_equal(a[:computed], b[:computed])) for a, b in zip(found, again, strict=True))
