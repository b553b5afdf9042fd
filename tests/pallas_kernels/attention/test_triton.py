"""The Triton kernels in the interpreter, through the public function: every feature against a float64 oracle."""

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import attention, config, segment_ranges, triton
from pallas_kernels.attention.api import REGISTRY, on_ranges
from pallas_kernels.attention.call import Call, Cotangents, Mask, Operands, Options
from pallas_kernels.attention.triton.config import Tiles, TritonConfig
from pallas_kernels.dispatch import Target
from tests.support.attention import QUICK, expected, gradients, inputs

A100 = Target("cuda", "NVIDIA A100-SXM4-80GB", (8, 0), 108)
SMALL = TritonConfig(forward=Tiles(16, 32, 4, 2), dkv=Tiles(32, 16, 4, 2), dq=Tiles(16, 32, 4, 2))

# Rows of 70: documents that begin and end within tiles and on their edges, one of a token, padding between and behind.
PACKED = np.array([[1] * 20 + [2] + [3] * 27 + [0] * 6 + [4] * 10 + [0] * 6, [0] * 3 + [1] * 29 + [2] * 38], np.int32)
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


@pytest.fixture
def interpreted(monkeypatch):
    """The implementation "triton" on CPU, with small tiles."""
    run = {"config": SMALL, "interpret": True}
    module = types.SimpleNamespace(
        why_not=lambda device, call: None,
        forward=functools.partial(triton.forward, **run),
        backward=functools.partial(triton.backward, **run),
    )
    monkeypatch.setitem(REGISTRY.implementations, "triton", on_ranges(module))
    monkeypatch.setattr(config, "preference", lambda target: ("triton",))


def problem(case, dtype):
    """The arguments that are differentiated, the cotangents of output and log-sum-exp, and the options."""
    case = {"size": 16} | case
    shape = {name: case.pop(name) for name in ("length", "keys", "size", "value_size") if name in case}
    q, k, v, dout = inputs(batch=2, dtype=dtype, seed=shape["length"], **shape)
    dlse = jnp.asarray(np.random.default_rng(1).standard_normal((2, 4, shape["length"])), jnp.float32)
    arguments = {"q": q, "k": k, "v": v}
    if "sinks" in case:
        arguments["sinks"] = jnp.asarray(case.pop("sinks"))
    if "dropout_rate" in case:
        case["dropout_key"] = jax.random.key(3)
    options = {name: jnp.asarray(value) if isinstance(value, np.ndarray) else value for name, value in case.items()}
    return arguments, (dout, dlse), options


def check(case, dtype, tolerance):
    arguments, cotangents, options = problem(case, dtype)
    ours = gradients(functools.partial(attention, return_lse=True, **options), arguments, cotangents)
    wanted = expected(arguments, cotangents, options)
    assert ours.keys() == wanted.keys()
    for name, actual in ours.items():
        finite = np.isfinite(wanted[name])
        np.testing.assert_array_equal(actual[~finite], wanted[name][~finite], err_msg=name)
        atol = tolerance * np.abs(wanted[name][finite]).max(initial=0.0)
        np.testing.assert_allclose(actual[finite], wanted[name][finite], rtol=tolerance, atol=atol, err_msg=name)


# Weights, logits' gradients and results are rounded to 16 bits: one unit of the largest result.
@pytest.mark.exhaustive("whole tiles", "documents")  # window and dropout are among all features, below
@pytest.mark.parametrize("name", CASES)
def test_matches_float64(name, interpreted):
    check(CASES[name], jnp.float16, 2**-10)


@pytest.mark.exhaustive("bfloat16-0.0078125")
@pytest.mark.parametrize("dtype, tolerance", [(jnp.bfloat16, 2**-7), (jnp.float16, 2**-10)])
def test_all_features_at_once(dtype, tolerance, interpreted):
    check(EVERYTHING, dtype, tolerance)


# Whole tiles of keys and of queries that rows 64 to 95 of 128 never meet.
@pytest.mark.exhaustive("documents")
@pytest.mark.parametrize(
    "options, documents, keys, queries",
    [
        ({}, None, np.r_[96:128], np.r_[0:64]),
        ({"causal": False}, [64, 32, 32], np.r_[0:64, 96:128], np.r_[0:64, 96:128]),
        ({"sliding_window": 17}, None, np.r_[0:32, 96:128], np.r_[0:64]),
        ({"sliding_window": 1, "causal": False}, None, np.r_[0:64, 96:128], np.r_[0:64, 96:128]),
    ],
    ids=["causal", "documents", "window", "window on both sides"],
)
def test_hidden_tiles_are_not_read(options, documents, keys, queries):
    """Not a number times a weight of 0 is not a number: tiles that were read and masked would show."""
    q, k, v, dout = inputs(batch=1, length=128, size=16, dtype=jnp.float16)
    ranges = None
    if documents is not None:
        ids = np.repeat(np.arange(1, len(documents) + 1, dtype=np.int32), documents)
        ranges = segment_ranges(jnp.asarray(ids)[None])
    call = Mask(ranges, None, None, jnp.zeros((1,), jnp.int32)), None, None
    options, run = Options(0.25, **options), {"config": SMALL, "interpret": True}
    shown = np.s_[:, 64:96]

    def passes(q, k, v, dout):
        operands = Operands(q, k, v, *call)
        out, lse = triton.forward(operands, options, **run)
        delta = jnp.einsum("bshd,bshd->bhs", dout, out).astype(jnp.float32)
        return out, *triton.backward(operands, Cotangents(lse, delta, dout, out), options, **run)

    def poisoned(rows, *arrays):
        return [array.at[:, rows].set(jnp.nan) for array in arrays]

    passes = jax.jit(passes, compiler_options=QUICK)
    out, dq, dk, dv = passes(q, k, v, dout)
    others = passes(q, *poisoned(keys, k, v), dout)
    np.testing.assert_array_equal(others[0][shown], out[shown])
    np.testing.assert_array_equal(others[1][shown], dq[shown])
    [q, dout] = poisoned(queries, q, dout)
    others = passes(q, k, v, dout)
    np.testing.assert_array_equal(others[2][shown], dk[shown])
    np.testing.assert_array_equal(others[3][shown], dv[shown])


@pytest.mark.parametrize(
    "target, change, reason",
    [
        (Target("cpu", "cpu", None, None), {}, r"compute capability 8.0 or more, the target is cpu \(cpu\)"),
        (Target("cuda", "Tesla T4", (7, 5), 40), {}, "8.0 or more, the target is Tesla T4"),
        (A100, {"dtype": jnp.float32}, "bfloat16 or float16, not float32"),
        (A100, {"size": 264}, "queries and keys must be a multiple of 8 and at most 256, not 264"),
        (A100, {"value_size": 12}, "values must be a multiple of 8 and at most 256, not 12"),
        (A100, {}, None),
    ],
)
def test_what_is_not_served_has_a_reason(target, change, reason):
    q, k, v, _ = inputs(**({"dtype": jnp.bfloat16} | change))
    found = REGISTRY["triton"].reason(target, call=Call(q, k, v, Options(1.0)), dtype=q.dtype)
    assert found is None if reason is None else re.search(reason, found)
