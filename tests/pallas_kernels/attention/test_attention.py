"""The XLA path against a float64 oracle, and what must hold for any attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import attention, config
from tests.support.attention import PACKED, QUICK, assert_close, inputs, oracle, value_and_gradients


@pytest.mark.parametrize(
    "kv_heads, causal, packed",
    [(1, True, True), (2, True, True), (4, True, True), (2, True, False), (2, False, True), (1, False, False)],
)
def test_float32_matches_float64(kv_heads, causal, packed):
    arrays = inputs(kv_heads=kv_heads)
    options = {"causal": causal, "scale": 0.4, "segment_ids": jnp.asarray(PACKED) if packed else None}
    ours = value_and_gradients(lambda q, k, v: attention(q, k, v, implementation="xla", **options), *arrays)
    assert_close(ours, oracle(*arrays, **options), 3e-6)  # float32 over 16 keys


@pytest.mark.parametrize("dtype, tolerance", [(jnp.bfloat16, 2**-7), (jnp.float16, 2**-10)])
def test_16_bit_inputs_match_float64(dtype, tolerance):
    arrays = inputs(dtype=dtype)
    options = {"segment_ids": jnp.asarray(PACKED)}
    ours = value_and_gradients(lambda q, k, v: attention(q, k, v, implementation="xla", **options), *arrays)
    assert [a.dtype for a in ours] == [dtype] * 4
    # probabilities, logits' gradients and results are rounded to 16 bits: one unit of the largest result
    assert_close(ours, oracle(*arrays, **options), tolerance)


@pytest.mark.parametrize("most, packed", [(1, True), (6, True), (6, False)])
def test_blocks_of_queries_change_nothing(most, packed, monkeypatch):
    """Blocks of one query, and of six with a last one of four."""
    monkeypatch.setattr(config, "_LOGITS_BYTES", most * 4 * 3 * 4 * 16)
    arrays = inputs()
    options = {"segment_ids": jnp.asarray(PACKED) if packed else None, "scale": 0.3}
    ours = value_and_gradients(lambda q, k, v: attention(q, k, v, **options), *arrays)
    assert_close(ours, oracle(*arrays, **options), 3e-6)


def test_block_size_bounds_the_logits():
    assert config.query_block(2, 4, 128, 128) == 128
    for batch, heads, length in ((4, 32, 2048), (1, 32, 8192), (1, 64, 131_072)):
        block = config.query_block(batch, heads, length, length)
        assert 1 <= block < length and 4 * batch * heads * block * length <= 2**27


def test_no_query_depends_on_a_later_key():
    q, k, v, _ = inputs(batch=1)
    for name, jacobian in zip(
        "kv", jax.jit(jax.jacobian(attention, argnums=(1, 2)), compiler_options=QUICK)(q, k, v), strict=True
    ):
        influence = np.abs(np.asarray(jacobian)).sum(axis=(0, 2, 3, 4, 6, 7))  # [S, T]
        assert not np.triu(influence, 1).any(), name
        visible = influence[np.tril_indices(16)] if name == "v" else influence[np.tril_indices(16)][1:]
        assert np.all(visible > 0), name  # (the first query's only key has no softmax to move)


def test_no_document_depends_on_another():
    q, k, v, _ = inputs(batch=1)
    segments = PACKED[:1]
    same = (segments[0][:, None] == segments[0][None, :]) & (segments[0] != 0)[:, None]
    attend = jax.jit(jax.jacobian(lambda v: attention(q, k, v, segment_ids=jnp.asarray(segments), causal=False)))
    jacobian = np.asarray(attend(v))
    influence = np.abs(np.asarray(jacobian)).sum(axis=(0, 2, 3, 4, 6, 7))
    np.testing.assert_array_equal(influence > 0, same)


def test_packed_equals_unpacked():
    q, k, v, dout = inputs(batch=1, length=16)
    lengths, segments = (6, 1, 7), PACKED[:1]
    packed = value_and_gradients(lambda q, k, v: attention(q, k, v, segment_ids=jnp.asarray(segments)), q, k, v, dout)
    start = 0
    for length in lengths:
        alone = [a[:, start : start + length] for a in (q, k, v, dout)]
        for ours, theirs in zip(packed, value_and_gradients(attention, *alone), strict=True):
            np.testing.assert_allclose(ours[:, start : start + length], theirs, atol=2e-6)
        start += length
    for array in packed:  # padding
        assert not np.any(array[:, start:])


def test_rows_of_padding_are_zero_and_pass_no_gradient():
    q, k, v, dout = inputs()
    results = value_and_gradients(lambda q, k, v: attention(q, k, v, segment_ids=jnp.asarray(PACKED)), q, k, v, dout)
    for array in results:
        assert not np.any(array[PACKED == 0])
        assert np.all(np.isfinite(array))


def test_cached_decoding_equals_the_whole_sequence():
    """Prefill of different lengths, then three tokens a row, against keys padded to the cache's size."""
    rows, size, prompts, new = 3, 16, np.array([4, 9, 1]), 3
    q, k, v, _ = inputs(rows, size)
    attend = jax.jit(attention)
    whole = attend(q, k, v)
    taken = prompts[:, None] + np.arange(new)[None, :]
    filled = np.arange(size)[None, :] < (prompts + new)[:, None]
    stale = np.where(filled[:, :, None, None], np.float32(0.0), np.float32(1e4))  # beyond the row's end
    out = attend(
        np.take_along_axis(np.asarray(q), taken[:, :, None, None], axis=1),
        np.asarray(k) + stale,
        np.asarray(v) + stale,
        segment_ids=jnp.ones((rows, new), jnp.int32),
        kv_segment_ids=jnp.asarray(filled, jnp.int32),
        query_offset=jnp.asarray(prompts, jnp.int32),
    )
    expected = np.take_along_axis(np.asarray(whole), taken[:, :, None, None], axis=1)
    np.testing.assert_allclose(out, expected, atol=2e-6)


def test_one_offset_serves_every_row():
    q, k, v, _ = inputs()
    late = jax.jit(lambda q, k, v: attention(q[:, 5:], k, v, query_offset=5))(q, k, v)
    np.testing.assert_allclose(late, jax.jit(attention)(q, k, v)[:, 5:], atol=1e-6)


def test_sharded_rows_match(monkeypatch):
    """Eight devices, one row each, inside shard_map with its checks on."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("data")
    q, k, v, dout = inputs(batch=8)
    segments = jnp.asarray(np.tile(PACKED, (3, 1))[:8])

    monkeypatch.setattr(config, "_LOGITS_BYTES", 6 * 4 * 4 * 16)

    def attend(q, k, v, segments):
        return attention(q, k, v, segment_ids=segments, scale=0.3)

    island = jax.shard_map(attend, mesh=mesh, in_specs=rows, out_specs=rows)
    ours = value_and_gradients(lambda q, k, v: island(q, k, v, segments), q, k, v, dout)
    assert_close(ours, oracle(q, k, v, dout, segment_ids=segments, scale=0.3), 3e-6)
