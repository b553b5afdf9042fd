"""Every feature of attention, alone and together, against a float64 oracle: values, log-sum-exp and all gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import api, attention, config, segment_ranges, xla
from pallas_kernels.attention.api import on_ranges
from tests.support.attention import PACKED, assert_close, expected, gradients, inputs, once, oracle, value_and_gradients

# Keys for PACKED's queries: a first document that is shorter, a second that no key belongs to, a third that is longer.
KEYS = np.array([[1] * 3 + [0] * 2 + [3] * 15, [0] * 4 + [1] * 16, [1] * 20], np.int32)
SINKS = np.array([0.5, -1.0, 2.0, -30.0], np.float32)
CASES = {
    "window on both sides": {"sliding_window": 3, "causal": False},
    "window": {"sliding_window": 4, "segment_ids": PACKED},
    "window of one key": {"sliding_window": 1},
    "cap": {"logits_soft_cap": 0.7, "segment_ids": PACKED, "scale": 2.0},
    "sinks": {"sinks": SINKS, "segment_ids": PACKED},
    "values smaller than keys": {"value_size": 4, "kv_heads": 1},
    "more keys": {"keys": 21},
    "fewer keys": {"keys": 11},
    "from the first key": {"keys": 21, "query_offset": 0},
    "an offset a row": {"keys": 21, "query_offset": np.array([0, 3, -2], np.int32)},
    "keys with documents of their own": {"keys": 20, "segment_ids": PACKED, "kv_segment_ids": KEYS, "causal": False},
    "documents of one token": {"segment_ids": np.tile(np.arange(1, 17, dtype=np.int32), (3, 1))},
    "padding alone": {"segment_ids": np.zeros((3, 16), np.int32)},
}
EVERYTHING = {
    "sliding_window": 5,
    "logits_soft_cap": 2.0,
    "sinks": SINKS,
    "segment_ids": PACKED,
    "kv_segment_ids": KEYS,
    "keys": 20,
    "value_size": 12,
    "query_offset": np.array([0, 4, 2], np.int32),
    "scale": 0.9,
}


def problem(case, seed=0, dtype=jnp.float32):
    """The arguments that are differentiated, the cotangents of output and log-sum-exp, and the options."""
    options = dict(case)
    shape = {name: options.pop(name) for name in ("keys", "value_size", "kv_heads") if name in options}
    q, k, v, dout = inputs(seed=seed, dtype=dtype, **shape)
    dlse = jnp.asarray(np.random.default_rng(seed + 1).standard_normal((3, 4, 16)), jnp.float32)
    arguments = {"q": q, "k": k, "v": v}
    if "sinks" in options:
        arguments["sinks"] = jnp.asarray(options.pop("sinks"))
    options = {name: jnp.asarray(value) if isinstance(value, np.ndarray) else value for name, value in options.items()}
    return arguments, (dout, dlse), options


def assert_matches(ours, wanted, tolerance):
    assert ours.keys() == wanted.keys()
    for name, actual in ours.items():
        finite = np.isfinite(wanted[name])
        np.testing.assert_array_equal(actual[~finite], wanted[name][~finite], err_msg=name)
        largest = np.abs(wanted[name][finite]).max(initial=0.0)
        np.testing.assert_allclose(
            actual[finite], wanted[name][finite], rtol=tolerance, atol=tolerance * largest, err_msg=name
        )


@pytest.mark.exhaustive("window", "sinks", "an offset a row", "keys with documents of their own")
@pytest.mark.parametrize("name", CASES)
def test_matches_float64(name):
    seed = list(CASES).index(name)
    arguments, cotangents, options = problem(CASES[name], seed)
    ours = gradients(lambda **a: attention(**a, **options, return_lse=True), arguments, cotangents)
    # float32 over at most 21 keys: sums of as many products, exponentials of numbers below 10
    assert_matches(ours, expected(arguments, cotangents, options), 1e-5)


@pytest.mark.parametrize("ranges", [False, True])
def test_all_features_at_once_in_blocks_of_queries(ranges, monkeypatch):
    monkeypatch.setattr(config, "_LOGITS_BYTES", 4 * 3 * 4 * 20 * 6)  # three blocks of 6 queries, the last one of 4
    arguments, cotangents, options = problem(EVERYTHING, 100)
    wanted = expected(arguments, cotangents, options)
    if ranges:
        made = once(segment_ranges, options.pop("segment_ids"), options.pop("kv_segment_ids"))
        options["segment_ranges"] = made

    def attend(**arguments):
        return attention(**arguments, **options, return_lse=True)

    assert_matches(gradients(attend, arguments, cotangents), wanted, 1e-5)
    assert "scan" in str(jax.make_jaxpr(lambda a: attend(**a))(arguments))


@pytest.mark.parametrize("dtype, tolerance", [(jnp.bfloat16, 2**-7), (jnp.float16, 2**-10)])
def test_all_features_in_16_bits(dtype, tolerance):
    arguments, cotangents, options = problem(EVERYTHING, 200, dtype)
    ours = gradients(lambda **a: attention(**a, **options, return_lse=True), arguments, cotangents)
    wanted = expected(arguments, cotangents, options)
    # weights, logits' gradients and results are rounded to 16 bits: one unit of the largest result
    assert_matches(ours, wanted, tolerance)


def test_ranges_and_ids_say_the_same():
    q, k, v, dout = inputs(seed=1)
    ids = jnp.asarray(PACKED)
    by_ids = value_and_gradients(lambda q, k, v: attention(q, k, v, segment_ids=ids), q, k, v, dout)
    ranges = once(segment_ranges, ids)
    by_ranges = value_and_gradients(lambda q, k, v: attention(q, k, v, segment_ranges=ranges), q, k, v, dout)
    for one, two in zip(by_ids, by_ranges, strict=True):
        np.testing.assert_array_equal(one, two)


def test_documents_in_several_pieces_are_served_as_ids():
    pieces = np.array([[1, 2, 1, 2, 0, 3, 1, 3], [2, 1, 2, 1, 0, 0, 3, 3]], np.int32)
    arrays, ids = inputs(batch=2, length=8), jnp.asarray(pieces)
    ours = value_and_gradients(lambda q, k, v: attention(q, k, v, segment_ids=ids), *arrays)
    assert_close(ours, oracle(*arrays, segment_ids=ids), 3e-6)  # float32 over 8 keys


@pytest.mark.exhaustive("True-3")
@pytest.mark.parametrize("causal, window", [(True, None), (True, 3), (False, 3), (False, None)])
def test_no_query_depends_on_a_key_it_does_not_see(causal, window):
    """The gradients of each query in every key and value are zero exactly where it sees none, documents included."""
    q, k, v, _ = inputs(batch=1, heads=2, kv_heads=1, size=4, seed=7)
    ranges = once(segment_ranges, jnp.asarray(PACKED[:1]))

    def row(k, v):
        return attention(q, k, v, segment_ranges=ranges, causal=causal, sliding_window=window)

    s, t = np.arange(16)[:, None], np.arange(16)[None, :]
    sees = (PACKED[0][:, None] == PACKED[0][None, :]) & (PACKED[0] != 0)[:, None]
    sees &= (t <= s) if causal else np.True_
    sees &= (abs(s - t) < window) if window else np.True_
    alone = sees & (sees.sum(axis=1) == 1)[:, None]  # its only key has no softmax to move
    for name, jacobian in zip("kv", once(jax.jacobian(row, argnums=(0, 1)), k, v), strict=True):
        influence = np.abs(np.asarray(jacobian)).sum(axis=(0, 2, 3, 4, 6, 7)) > 0  # [S, T]
        np.testing.assert_array_equal(influence, sees & ~alone if name == "k" else sees, err_msg=name)


def test_a_query_that_sees_nothing_has_the_sinks_log_sum_exp_or_none():
    q, k, v, _ = inputs()
    attend = functools.partial(attention, segment_ids=jnp.asarray(PACKED), return_lse=True)
    out, lse = once(attend, q, k, v)
    blind = np.broadcast_to((PACKED == 0)[:, None], lse.shape)
    assert np.all(np.asarray(lse)[blind] == -np.inf) and np.all(np.isfinite(np.asarray(lse)[~blind]))
    _, with_sinks = once(functools.partial(attend, sinks=jnp.asarray(SINKS)), q, k, v)
    np.testing.assert_array_equal(
        np.asarray(with_sinks)[blind], np.broadcast_to(SINKS[None, :, None], lse.shape)[blind]
    )
    assert not np.any(np.asarray(out)[PACKED == 0])


def test_rows_known_by_their_log_sum_exp_join_to_the_whole():
    """Attention over two halves of the keys, weighted by exp(lse − lse of all), is that over all, in gradient too."""
    q, k, v, dout = inputs(batch=2, seed=3)

    def halves(q, k, v):
        parts = [
            attention(q, k[:, part], v[:, part], causal=False, return_lse=True) for part in (slice(0, 7), slice(7, 16))
        ]
        total = jnp.logaddexp(parts[0][1], parts[1][1])
        weights = [jnp.exp(lse - total).transpose(0, 2, 1)[..., None] for _, lse in parts]
        return parts[0][0] * weights[0] + parts[1][0] * weights[1]

    ours = value_and_gradients(halves, q, k, v, dout)
    whole = value_and_gradients(lambda q, k, v: attention(q, k, v, causal=False), q, k, v, dout)
    assert_close(ours, [np.asarray(a) for a in whole], 5e-6)  # float32, twice


def test_the_passes_may_be_of_different_implementations():
    q, k, v, dout = inputs()
    pair = value_and_gradients(lambda q, k, v: attention(q, k, v, implementation=("xla", None)), q, k, v, dout)
    for one, two in zip(pair, value_and_gradients(attention, q, k, v, dout), strict=True):
        np.testing.assert_array_equal(one, two)


class RangesAlone:
    """An implementation that, like a kernel, reads documents as ranges only and may not serve a call."""

    def __init__(self):
        self.calls = []

    def why_not(self, _, call):
        assert call.disorder is None
        rate = call.options.dropout_rate
        return f"it has no dropout, not {rate}" if rate else None

    def forward(self, operands, options):
        return xla.forward(self.without_ids(operands), options)

    def backward(self, operands, cotangents, options):
        return xla.backward(self.without_ids(operands), cotangents, options)

    def without_ids(self, operands):
        self.calls.append(operands.mask.ranges is not None)
        return operands._replace(mask=operands.mask._replace(segment_ids=None, kv_segment_ids=None))


@pytest.fixture
def kernel(monkeypatch):
    found = RangesAlone()
    monkeypatch.setitem(api.REGISTRY.implementations, "kernel", on_ranges(found))
    monkeypatch.setattr(api, "NEEDS_RANGES", {"kernel"})
    monkeypatch.setattr(config, "preference", lambda target: ("kernel", "xla"))
    return found


def test_an_implementation_that_needs_ranges_gets_them(kernel):
    """Ranges of ids that are known, or as ranges; each pass once."""
    arrays, ids = inputs(), jnp.asarray(PACKED)
    expected = oracle(*arrays, segment_ids=ids)
    for documents in ({"segment_ids": ids}, {"segment_ranges": once(segment_ranges, ids)}):
        ours = value_and_gradients(functools.partial(attention, **documents), *arrays)
        assert_close(ours, expected, 3e-6)
        assert kernel.calls == [True, True]
        kernel.calls.clear()
    jax.eval_shape(lambda *arrays: attention(*arrays), *arrays[:3])
    assert kernel.calls == [False]


def test_documents_that_may_be_in_pieces_do_not_reach_an_implementation_that_needs_ranges(kernel):
    q, k, v, _ = inputs(batch=1, length=4)
    pieces = jnp.asarray([[1, 2, 1, 0]])

    def traced(ids, **options):
        return attention(q, k, v, segment_ids=ids, **options)

    once(traced, pieces), traced(pieces)
    assert kernel.calls == []
    with pytest.raises(NotImplementedError, match="known only at run time may not be contiguous: pass segment_ranges"):
        jax.eval_shape(lambda ids: traced(ids, implementation="kernel"), pieces)
    with pytest.raises(NotImplementedError, match="got document 1 after document 2 at row 0, place 2"):
        traced(pieces, implementation="kernel")
    with pytest.raises(NotImplementedError, match="no dropout, not 0.5"):
        attention(q, k, v, dropout_rate=0.5, dropout_key=jax.random.key(0), implementation="kernel")
