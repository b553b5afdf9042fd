"""The Triton kernels in the interpreter, through the public function: every feature against a float64 oracle."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import attention, config, reference, segment_ranges, triton
from pallas_kernels.attention.implementations import IMPLEMENTATIONS
from pallas_kernels.attention.mask import Mask
from pallas_kernels.attention.options import Options
from pallas_kernels.attention.ranges import SegmentRanges
from pallas_kernels.attention.triton.config import Tiles, TritonConfig

SMALL = TritonConfig(forward=Tiles(16, 32, 4, 2), dkv=Tiles(32, 16, 4, 2), dq=Tiles(16, 32, 4, 2))
BATCH, HEADS, KV_HEADS = 2, 4, 2
QUICK = {"xla_backend_optimization_level": 0}  # for functions that run once

# Rows of 70: documents that begin and end within tiles and on their edges, one of a token, padding between and behind.
PACKED = np.array(
    [[1] * 20 + [2] + [3] * 27 + [0] * 6 + [4] * 10 + [0] * 6, [0] * 3 + [1] * 29 + [2] * 38], np.int32
)
KEYS = np.array([[1] * 10 + [0] * 6 + [3] * 30 + [4] * 34, [1] * 40 + [2] * 16 + [0] * 24], np.int32)
SINKS = np.array([0.5, -1.0, 2.0, -30.0], np.float32)
CASES = {
    "whole tiles": {"length": 64},
    "whole tiles, not causal": {"length": 64, "causal": False},
    "a head size that is no power of two": {"length": 40, "size": 80, "value_size": 48},
    "more keys": {"length": 37, "keys": 75},
    "fewer keys": {"length": 75, "keys": 37},
    "not causal, more keys": {"length": 37, "keys": 75, "causal": False},
    "an offset a row": {"length": 40, "keys": 64, "query_offset": np.array([20, -9], np.int32)},
    "window": {"length": 70, "sliding_window": 19},
    "window on both sides": {"length": 70, "sliding_window": 9, "causal": False},
    "window over everything": {"length": 40, "sliding_window": 1000},
    "cap and sinks": {"length": 40, "logits_soft_cap": 1.5, "sinks": SINKS},
    "negative scale": {"length": 20, "scale": -0.4},
    "scale 0": {"length": 20, "scale": 0.0},
    "documents": {"length": 70, "segment_ids": PACKED},
    "documents, not causal, keys of their own": {
        "length": 70, "keys": 80, "segment_ids": PACKED, "kv_segment_ids": KEYS, "causal": False,
    },
    "dropout": {"length": 40, "keys": 50, "dropout_rate": 0.3},
}  # fmt: skip
EVERYTHING = {
    "length": 70,
    "keys": 80,
    "size": 24,
    "value_size": 40,
    "segment_ids": PACKED,
    "kv_segment_ids": KEYS,
    "query_offset": np.array([7, 3], np.int32),
    "sliding_window": 21,
    "logits_soft_cap": 2.0,
    "sinks": SINKS,
    "scale": 0.9,
    "dropout_rate": 0.25,
}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """The implementation "triton" on CPU, with small tiles."""
    run = {"config": SMALL, "interpret": True}
    module = types.SimpleNamespace(
        unsupported=lambda *call, **options: None,
        forward=functools.partial(triton.forward, **run),
        backward=functools.partial(triton.backward, **run),
    )
    monkeypatch.setitem(IMPLEMENTATIONS, "triton", module)
    monkeypatch.setattr(config, "preference", lambda target, direction: ("triton",))


def problem(case, dtype=jnp.float16):
    """The arguments that are differentiated, the cotangents of output and log-sum-exp, and the options."""
    case = dict(case)
    length = case.pop("length")
    keys, size = case.pop("keys", length), case.pop("size", 16)
    value_size = case.pop("value_size", size)
    rng = np.random.default_rng(length + keys)

    def normal(*shape, dtype=dtype):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    arguments = {
        "q": normal(BATCH, length, HEADS, size),
        "k": normal(BATCH, keys, KV_HEADS, size),
        "v": normal(BATCH, keys, KV_HEADS, value_size),
    }
    cotangents = normal(BATCH, length, HEADS, value_size), normal(BATCH, HEADS, length, dtype=jnp.float32)
    if "sinks" in case:
        arguments["sinks"] = jnp.asarray(case.pop("sinks"))
    if "dropout_rate" in case:
        case["dropout_key"] = jax.random.key(3)
    return arguments, cotangents, {n: jnp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in case.items()}


def results(function, arguments, cotangents):
    """Output, log-sum-exp and the arguments' gradients by name, in float64."""

    def both(arguments, cotangents):
        values, vjp = jax.vjp(lambda arguments: function(**arguments, return_lse=True), arguments)
        return dict(zip(("out", "lse"), values, strict=True)), *vjp(cotangents)

    values, gradients = jax.jit(both, compiler_options=QUICK)(arguments, cotangents)
    return {n: np.asarray(x, np.float64) for n, x in (values | {f"d{n}": x for n, x in gradients.items()}).items()}


def check(case, dtype, tolerance):
    arguments, cotangents, options = problem(case, dtype)
    ours = results(functools.partial(attention, **options), arguments, cotangents)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), (arguments, cotangents))
        expected = results(functools.partial(reference.attention, **options), *wide)
    assert ours.keys() == expected.keys()
    for name, actual in ours.items():
        finite = np.isfinite(expected[name])
        np.testing.assert_array_equal(actual[~finite], expected[name][~finite], err_msg=name)
        atol = tolerance * np.abs(expected[name][finite]).max(initial=0.0)
        np.testing.assert_allclose(actual[finite], expected[name][finite], rtol=tolerance, atol=atol, err_msg=name)


# Weights, logits' gradients and results are rounded to 16 bits: one unit of the largest result.
@pytest.mark.parametrize("name", CASES)
def test_matches_float64(name):
    check(CASES[name], jnp.float16, 2**-10)


@pytest.mark.parametrize("dtype, tolerance", [(jnp.bfloat16, 2**-7), (jnp.float16, 2**-10)])
def test_all_features_at_once(dtype, tolerance):
    check(EVERYTHING, dtype, tolerance)
