"""Dropout of attention weights: the generator's statistics, and that both passes drop the same weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import attention, config, dropout, reference
from tests.support.attention import PACKED, QUICK, gradients, inputs, once

HEADS, LENGTH = 12, 160


@pytest.fixture(scope="module")
def bits():
    """Numbers of 12 heads with 160 × 160 weights each, float64 in [0, 1)."""
    draw = jax.jit(
        lambda seed: dropout.random_bits(
            (seed[0], seed[1]),
            jnp.arange(HEADS, dtype=jnp.uint32).reshape(HEADS, 1, 1),
            jnp.arange(LENGTH, dtype=jnp.uint32).reshape(1, LENGTH, 1),
            jnp.arange(LENGTH, dtype=jnp.uint32).reshape(1, 1, LENGTH),
        )
    )
    return np.stack([np.asarray(draw(jnp.asarray(seed, jnp.uint32)), np.float64) / 2**32 for seed in ((1, 2), (1, 3))])


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_as_many_weights_are_dropped_as_asked_for(bits, rate):
    dropped = bits[0] < dropout.threshold(rate) / 2**32
    deviation = np.sqrt(rate * (1 - rate))
    assert abs(dropped.mean() - rate) < 5 * deviation / np.sqrt(dropped.size)
    for axes in ((1, 2), (0, 2), (0, 1)):  # each head, each query, each key: 332 of them
        count = dropped.size / dropped.mean(axis=axes).size
        assert np.abs(dropped.mean(axis=axes) - rate).max() < 5 * deviation / np.sqrt(count), axes


def test_the_bits_are_spread_evenly(bits):
    """χ² over 256 equal bins: its mean is 255 and its standard deviation √510."""
    counts = np.histogram(bits[0], 256, (0, 1))[0]
    assert abs(np.sum((counts - counts.mean()) ** 2 / counts.mean()) - 255) < 5 * np.sqrt(510)


def test_heads_rows_neighbours_and_seeds_are_independent(bits):
    """Correlations of n pairs of independent numbers have a standard deviation of 1/√n."""
    flat = bits.reshape(2 * HEADS, -1)
    correlations = np.corrcoef(flat)[np.triu_indices(2 * HEADS, 1)]  # heads of one seed and of two
    assert np.abs(correlations).max() < 5.5 / np.sqrt(flat.shape[1])
    rows = np.corrcoef(bits[0, 0])[np.triu_indices(LENGTH, 1)]
    assert np.abs(rows).max() < 5.5 / np.sqrt(LENGTH)  # 12,720 pairs
    for shift in ((0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 1, 1), (0, 1, -1)):
        pair = np.corrcoef(bits[0].reshape(-1), np.roll(bits[0], shift, (0, 1, 2)).reshape(-1))[0, 1]
        assert abs(pair) < 5 / np.sqrt(bits[0].size), shift


def test_a_device_drops_of_its_rows_what_one_device_alone_would():
    q, k, v, _ = inputs(batch=2, length=8)
    dropping = jax.jit(
        lambda q, k, v, row: attention(q, k, v, dropout_rate=0.3, dropout_key=jax.random.key(4), dropout_row=row)
    )
    whole = dropping(q, k, v, 0)
    second, other = (dropping(q[1:], k[1:], v[1:], row) for row in (1, 0))
    np.testing.assert_allclose(second, whole[1:], rtol=0, atol=1e-6)  # float32 in another order
    assert np.abs(other - whole[1:]).max() > 0.1


def test_the_mean_over_many_draws_is_attention_without_dropout():
    q, k, v, _ = inputs(batch=2, length=8)
    draws = jax.vmap(lambda key: attention(q, k, v, dropout_rate=0.3, dropout_key=key))
    keys = jax.random.split(jax.random.key(0), 4000)
    samples = np.asarray(once(draws, keys), np.float64)
    expected = np.asarray(once(attention, q, k, v))
    error = np.abs(samples.mean(axis=0) - expected)
    assert np.all(error < 5 * samples.std(axis=0) / np.sqrt(len(keys)) + 1e-6)  # 512 numbers


def kept_by(q, k, key, rate, ids):
    """Which of the weights [B, H, S, T] attention keeps, seen from outside: with v = 1 for one key, out is a weight."""
    batch, keys, kv_heads = k.shape[:3]
    v = jnp.broadcast_to(jnp.eye(keys, dtype=q.dtype)[None, :, None], (batch, keys, kv_heads, keys))
    attend = functools.partial(attention, segment_ids=ids, dropout_rate=rate, dropout_key=key)
    return once(attend, q, k, v).transpose(0, 2, 1, 3) != 0.0


@pytest.mark.exhaustive("6")
@pytest.mark.parametrize("most", [16, 6])
def test_both_passes_drop_the_same_weights_in_blocks_of_any_size(most, monkeypatch):
    monkeypatch.setattr(config, "_LOGITS_BYTES", most * 4 * 3 * 4 * 16)
    q, k, v, dout = inputs(seed=5)
    sinks, ids = jnp.asarray([0.1, 1.0, -2.0, 0.5], jnp.float32), jnp.asarray(PACKED)
    dlse = jnp.asarray(np.random.default_rng(6).standard_normal((3, 4, 16)), jnp.float32)
    arguments, cotangents = {"q": q, "k": k, "v": v, "sinks": sinks}, (dout, dlse)
    options = {"segment_ids": ids, "dropout_rate": 0.4, "return_lse": True}
    key = jax.random.key(3)
    ours = gradients(lambda **a: attention(**a, **options, dropout_key=key), arguments, cotangents)
    kept = kept_by(q, k, key, 0.4, ids)
    visible = (PACKED[:, :, None] == PACKED[:, None, :]) & (PACKED != 0)[:, :, None] & np.tri(16, dtype=bool)
    share = np.asarray(kept)[np.broadcast_to(visible[:, None], kept.shape)].mean()
    assert 0.5 < share < 0.7  # of 736 weights
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), (arguments, cotangents))
        expected = gradients(lambda **a: reference.attention(**a, **options, kept=kept), *wide)
    for name, actual in ours.items():
        finite = np.isfinite(expected[name])
        largest = np.abs(expected[name][finite]).max()
        # float32 over 16 keys
        np.testing.assert_allclose(actual[finite], expected[name][finite], rtol=1e-5, atol=1e-5 * largest, err_msg=name)


def test_the_reference_drops_what_attention_drops():
    q, k, _, _ = inputs(seed=8)
    key = jax.random.key(4)
    kept = kept_by(q, k, key, 0.25, None)
    causal = np.tri(16, dtype=bool)
    expected = once(lambda key: reference.kept_weights(key, 0.25, (3, 4, 16, 16)), key)
    np.testing.assert_array_equal(np.asarray(kept)[:, :, causal], np.asarray(expected)[:, :, causal])


def test_a_rate_of_zero_costs_nothing():
    q, k, v, _ = inputs()
    key = jax.random.key(0)
    without = jax.make_jaxpr(attention)(q, k, v)
    zero = jax.make_jaxpr(lambda q, k, v: attention(q, k, v, dropout_rate=0.0, dropout_key=key))(q, k, v)
    assert str(zero) == str(without)


def test_any_kind_of_key_serves():
    q, k, v, _ = inputs(batch=1)
    attend = jax.jit(lambda key: attention(q, k, v, dropout_rate=0.5, dropout_key=key), compiler_options=QUICK)
    outs = [np.asarray(attend(key)) for key in (jax.random.key(1), jax.random.key(2), jax.random.key(1, impl="rbg"))]
    assert not np.array_equal(outs[0], outs[1]) and not np.array_equal(outs[0], outs[2])
    np.testing.assert_array_equal(outs[0], attend(jax.random.key(1)))
