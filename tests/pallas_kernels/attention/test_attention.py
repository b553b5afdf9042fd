"""The XLA path against a float64 oracle, and properties of any attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import attention, config, reference
from tests.support.attention import PACKED, assert_close, gradients, inputs, oracle, value_and_gradients


@pytest.mark.exhaustive("2-True-True")
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


@pytest.mark.exhaustive("6-True")
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
    """Eight devices, one row each and the same sinks, inside shard_map with its checks on."""
    monkeypatch.setattr(config, "_LOGITS_BYTES", 6 * 4 * 4 * 16)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, everywhere = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    q, k, v, dout = inputs(batch=8)
    segments = jnp.asarray(np.tile(PACKED, (3, 1))[:8])
    arguments = {"q": q, "k": k, "v": v, "sinks": jnp.asarray([0.5, -1.0, 2.0, -30.0], jnp.float32)}
    cotangents = dout, jnp.ones((8, 4, 16), jnp.float32)

    def attend(arguments, segments, attention=attention):
        return attention(**arguments, segment_ids=segments, return_lse=True)

    island = jax.shard_map(
        attend, mesh=mesh, in_specs=(dict.fromkeys("qkv", rows) | {"sinks": everywhere}, rows), out_specs=rows
    )
    ours = gradients(lambda **arguments: island(arguments, segments), arguments, cotangents)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), (arguments, cotangents))
        expected = gradients(lambda **arguments: attend(arguments, segments, reference.attention), *wide)
    assert ours.keys() == expected.keys() == {"out", "lse", "dq", "dk", "dv", "dsinks"}
    assert_close(ours.values(), expected.values(), 5e-6)  # float32 over 16 keys, and for the sinks over 128 queries
