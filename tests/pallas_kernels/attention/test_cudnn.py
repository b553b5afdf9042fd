"""Calls of cuDNN with a stand-in for it."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.attention import attention, segment_ranges
from tests.support import cudnn as stand_in
from tests.support.attention import PACKED, assert_close, inputs, once, oracle, value_and_gradients

H200 = dispatch.Target("cuda", "NVIDIA H200", (9, 0), 132)

by_cudnn = functools.partial(attention, implementation="cudnn")


PATHS = {
    "none": ({}, None),
    "not causal": ({"causal": False}, None),
    "window": ({"sliding_window": 3}, None),
    "ids": ({}, "segment_ids"),
    "ranges": ({}, "segment_ranges"),
    "ranges, not causal": ({"causal": False}, "segment_ranges"),
    "ranges, window": ({"sliding_window": 3}, "segment_ranges"),
    "ranges, as many key heads": ({"kv_heads": 4}, "segment_ranges"),
}


@pytest.mark.exhaustive("window", "ids", "ranges, window")
@pytest.mark.parametrize("path", PATHS)
def test_values_and_gradients(path, monkeypatch):
    options, name = PATHS[path]
    options = dict(options)
    calls = stand_in.install(monkeypatch)
    monkeypatch.setattr(dispatch, "target", lambda: H200)
    arrays, ids = inputs(kv_heads=options.pop("kv_heads", 2), dtype=jnp.bfloat16), jnp.asarray(PACKED)
    documents = {} if name is None else {name: ids if name == "segment_ids" else once(segment_ranges, ids)}
    ours = value_and_gradients(functools.partial(by_cudnn, **documents, **options), *arrays)
    # one rounding of each result to bfloat16, and of the output that the backward pass starts from
    assert_close(ours, oracle(*arrays, **options, **({"segment_ids": ids} if documents else {})), 2**-7)
    assert [direction for direction, *_ in calls] == ["fwd", "bwd"]
    assert all((operands[3].size > 0) == bool(documents) for _, operands, _ in calls)
    if documents:
        for array in ours:
            assert not np.any(np.asarray(array)[PACKED == 0])


def test_a_query_whose_document_has_no_key_gives_zero(monkeypatch):
    stand_in.install(monkeypatch)
    monkeypatch.setattr(dispatch, "target", lambda: H200)
    arrays = inputs(dtype=jnp.bfloat16)
    ids = {"segment_ids": jnp.asarray(PACKED), "kv_segment_ids": jnp.asarray(np.where(PACKED == 2, 9, PACKED))}
    ours = value_and_gradients(functools.partial(by_cudnn, **ids), *arrays)
    assert_close(ours, oracle(*arrays, **ids), 2**-7)
    assert not np.any(np.asarray(ours[0])[PACKED == 2])


def test_log_sum_exp_is_that_of_the_documents(monkeypatch):
    stand_in.install(monkeypatch)
    monkeypatch.setattr(dispatch, "target", lambda: H200)
    q, k, v, _ = inputs(dtype=jnp.bfloat16)
    ids = jnp.asarray(PACKED)
    lse_of = functools.partial(attention, return_lse=True)
    _, plain = once(functools.partial(lse_of, segment_ids=ids, implementation="xla"), q, k, v)
    for documents in ({"segment_ranges": once(segment_ranges, ids)}, {"segment_ids": ids}):
        _, lse = once(functools.partial(lse_of, implementation=("cudnn", "xla"), **documents), q, k, v)
        np.testing.assert_allclose(lse, plain, rtol=1e-5, atol=1e-5)  # float32 sums of 16


def test_each_pass_can_be_cudnns_alone(monkeypatch):
    """Residuals (output, log-sum-exp) mean the same to both implementations."""
    calls = stand_in.install(monkeypatch)
    monkeypatch.setattr(dispatch, "target", lambda: H200)
    arrays, ids = inputs(dtype=jnp.bfloat16), jnp.asarray(PACKED)
    expected = oracle(*arrays, segment_ids=ids)
    for pair in (("cudnn", "xla"), ("xla", "cudnn")):
        attend = functools.partial(attention, segment_ranges=once(segment_ranges, ids), implementation=pair)
        assert_close(value_and_gradients(attend, *arrays), expected, 2**-7)  # as above, and XLA's weights
    assert len(calls) == 2
