"""Calls of cuDNN with a stand-in for it, and its list of documents."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as fused

from pallas_kernels import dispatch
from pallas_kernels.attention import attention, cudnn_documents, segment_ranges
from pallas_kernels.attention.options import Options
from tests.support import cudnn as stand_in
from tests.support.attention import PACKED, assert_close, inputs, once, oracle, value_and_gradients

H200 = dispatch.Target("cuda", "NVIDIA H200", (9, 0), 132)
A100 = dispatch.Target("cuda", "NVIDIA A100-SXM4-80GB", (8, 0), 108)
WRAPPED, LISTED = "_dot_product_attention_fwd_p_wrapper", "_dot_product_attention_fwd_p"


by_cudnn = functools.partial(attention, implementation="cudnn")


def made(ids, max_documents=None):
    return once(lambda ids: segment_ranges(ids, max_documents=max_documents), ids)


PATHS = {
    "none": ({}, WRAPPED, False),
    "not causal": ({"causal": False}, WRAPPED, False),
    "window": ({"sliding_window": 3}, WRAPPED, False),
    "ids": ({"segment_ids": PACKED}, WRAPPED, True),
    "ranges": ({"max_documents": None}, WRAPPED, True),
    "ranges, not causal": ({"max_documents": None, "causal": False}, WRAPPED, True),
    "ranges, window": ({"max_documents": 3, "sliding_window": 3}, WRAPPED, True),
    "list": ({"max_documents": 3}, LISTED, False),
    "list, not causal": ({"max_documents": 5, "causal": False}, LISTED, False),
    "list, as many key heads": ({"max_documents": 3, "kv_heads": 4}, LISTED, False),
}


@pytest.mark.exhaustive("window", "ids", "ranges, window", "list")
@pytest.mark.parametrize("path", PATHS)
def test_values_and_gradients(path, monkeypatch):
    options, primitive, biased = PATHS[path]
    options = dict(options)
    calls = stand_in.install(monkeypatch)
    monkeypatch.setattr(dispatch, "target", lambda: H200)
    arrays, ids = inputs(kv_heads=options.pop("kv_heads", 2), dtype=jnp.bfloat16), jnp.asarray(PACKED)
    documents = {"segment_ids": jnp.asarray(options.pop("segment_ids"))} if "segment_ids" in options else {}
    if "max_documents" in options:
        documents = {"segment_ranges": made(ids, options.pop("max_documents"))}
    ours = value_and_gradients(functools.partial(by_cudnn, **documents, **options), *arrays)
    # one rounding of each result to bfloat16, and of the output that the backward pass starts from
    assert_close(ours, oracle(*arrays, **options, **({"segment_ids": ids} if documents else {})), 2**-7)
    assert [name for name, *_ in calls] == [primitive, primitive.replace("fwd", "bwd")]
    assert all((operands[3].size > 0) == biased for _, operands, _ in calls)
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
    for documents in ({"segment_ranges": made(ids, 3)}, {"segment_ids": ids}):
        _, lse = once(functools.partial(lse_of, implementation=("cudnn", "xla"), **documents), q, k, v)
        np.testing.assert_allclose(lse, plain, rtol=1e-5, atol=1e-5)  # float32 sums of 16


def test_each_pass_can_be_cudnns_alone(monkeypatch):
    """Residuals (output, log-sum-exp) mean the same to both implementations."""
    calls = stand_in.install(monkeypatch)
    monkeypatch.setattr(dispatch, "target", lambda: H200)
    arrays, ids = inputs(dtype=jnp.bfloat16), jnp.asarray(PACKED)
    expected = oracle(*arrays, segment_ids=ids)
    for ranges in (made(ids), made(ids, 3)):
        for pair in (("cudnn", "xla"), ("xla", "cudnn")):
            attend = functools.partial(attention, segment_ranges=ranges, implementation=pair)
            assert_close(value_and_gradients(attend, *arrays), expected, 2**-7)  # as above, and XLA's weights
    assert len(calls) == 4


def test_documents_beyond_the_list_give_nan(monkeypatch):
    stand_in.install(monkeypatch)
    monkeypatch.setattr(dispatch, "target", lambda: H200)
    q, k, v, _ = inputs(dtype=jnp.bfloat16)
    ranges = made(jnp.asarray(PACKED), 2)
    out = np.asarray(once(functools.partial(by_cudnn, segment_ranges=ranges), q, k, v), np.float32)
    np.testing.assert_array_equal(np.isnan(out).all(axis=(2, 3)), PACKED == 3)
    np.testing.assert_array_equal(np.isnan(out).any(axis=(2, 3)), PACKED == 3)


def test_older_cards_get_a_bias_instead_of_the_list(monkeypatch):
    calls = stand_in.install(monkeypatch)
    monkeypatch.setattr(dispatch, "target", lambda: A100)
    q, k, v, _ = inputs(dtype=jnp.bfloat16)
    ranges = made(jnp.asarray(PACKED), 3)
    jax.eval_shape(functools.partial(by_cudnn, segment_ranges=ranges), q, k, v)
    assert [name for name, *_ in calls] == [WRAPPED]


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"max_documents": None}, "needs the list of documents: pass segment_ranges"),
        ({"target": A100}, "compute capability 9.0 or more, the target is NVIDIA A100"),
        ({"options": Options(1.0, sliding_window=5)}, "no sliding window"),
        ({"shape": (2**15, 16, 64, 64)}, "counts elements in 32 bits, the queries have 2147483648"),
        ({}, None),
    ],
)
def test_why_the_list_is_not_used(changes, reason):
    shape = changes.get("shape", (3, 16, 4, 64))
    q = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    ranges = made(jnp.asarray(PACKED), changes.get("max_documents", 3))
    found = cudnn_documents.why_not(changes.get("target", H200), q, q, ranges, changes.get("options", Options(1.0)))
    assert found == reason if reason is None else reason in str(found)


def test_the_list_is_the_one_that_jaxs_wrapper_makes():
    """Of lists by row, -1 where a row has fewer documents; for one number of heads, where all versions are right."""
    ids = np.zeros((4, 16), np.int32)
    ids[0, 1:9], ids[1], ids[3, 4:] = [1, 1, 1, 2, 4, 4, 4, 4], 1, [1] * 5 + [2] * 7
    ranges = made(jnp.asarray(ids), 4)
    documents = ranges.documents
    assert documents is not None
    there = documents.length > 0
    lengths = jnp.where(there, documents.length, -1)
    starts = jnp.pad(jnp.where(there, documents.start, -1), ((0, 0), (0, 1)), constant_values=-1)
    array = jnp.zeros((4, 16, 3, 8), jnp.bfloat16)
    expected = once(fused._fix_seqlen_offsets, lengths, lengths, starts, starts, array, array)
    listed = once(cudnn_documents.listed, ranges)
    np.testing.assert_array_equal(listed.length.reshape(4, 4), expected[0])
    for theirs in expected[2:]:
        np.testing.assert_array_equal(cudnn_documents.offsets(listed, 3, 8), theirs)


def test_the_real_primitives_accept_the_operands():
    """Abstract evaluation, as tracing for a card does it, in the version of JAX that is installed."""
    q, k, v, dout = inputs(dtype=jnp.bfloat16)
    ranges = made(jnp.asarray(PACKED), 3)
    options = Options(0.3)
    out, lse = jax.eval_shape(lambda *a: cudnn_documents.forward(*a, ranges, options), q, k, v)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, (3, 4, 16), jnp.float32)
    found = jax.eval_shape(
        lambda *a: cudnn_documents.backward(*a[:3], ranges, *a[3:], options), q, k, v, lse, out, dout
    )
    assert [leaf.shape for leaf in found] == [q.shape, k.shape, v.shape]
