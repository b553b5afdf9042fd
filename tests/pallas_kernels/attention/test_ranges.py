"""Documents as ranges: against a plain search, and over several devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention.ranges import TILE, order_of_all, segment_ranges
from tests.support.attention import QUICK


def packed_rows(rng, rows, length, most_tokens):
    """Documents of random lengths (often 1), some numbers left out, padding before, between and behind them."""
    ids = np.zeros((rows, length), np.int32)
    for row in ids[1:]:  # the first row is padding
        place, document = 0, 0
        while place < length:
            document += rng.integers(1, 3)
            tokens = rng.integers(1, most_tokens) if rng.random() < 0.7 else 1
            place += rng.integers(0, 4) if rng.random() < 0.3 else 0
            row[place : place + tokens] = document
            place += tokens
    return ids


def plain_ranges(rows, columns):
    """For every row id but 0 where its columns are, [start, end)."""
    starts, ends = np.zeros_like(rows), np.zeros_like(rows)
    for place in np.ndindex(rows.shape):
        found = np.flatnonzero((columns[place[0]] == rows[place]) & (rows[place] != 0))
        if found.size:
            starts[place], ends[place] = found[0], found[-1] + 1
    return starts, ends


compiled = jax.jit(segment_ranges, compiler_options=QUICK)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("own_keys", [False, True])
def test_ranges_are_where_the_documents_are(seed, own_keys):
    rng = np.random.default_rng(seed)
    queries = packed_rows(rng, 5, 300, 90)
    keys = packed_rows(rng, 5, 210, 60) if own_keys else queries
    ranges = compiled(queries, keys)
    for start, end, rows, columns in (
        (ranges.k_start, ranges.k_end, queries, keys),
        (ranges.q_start, ranges.q_end, keys, queries),
    ):
        start, end = np.asarray(start), np.asarray(end)
        first, last = plain_ranges(rows, columns)
        there = first < last
        np.testing.assert_array_equal(start[there], first[there])
        np.testing.assert_array_equal(end[there], last[there])
        np.testing.assert_array_equal(start[~there], end[~there])
        assert np.all(np.diff(start, axis=1) >= 0) and np.all(np.diff(end, axis=1) >= 0)


def test_tiles_come_heaviest_first():
    """The keys that a causal tile of queries spans, from its first query's first key to its last query's last."""
    ids = packed_rows(np.random.default_rng(9), 4, 5 * TILE - 7, 400)
    ranges = compiled(ids)
    start, end, place = np.asarray(ranges.k_start), np.asarray(ranges.k_end), np.arange(ids.shape[1])
    for row, order in enumerate(np.asarray(ranges.q_order)):
        assert sorted(order) == list(range(5))
        last = np.minimum(end[row], place + 1)
        spans = [last[min(t * TILE + TILE, ids.shape[1]) - 1] - start[row, t * TILE] for t in order]
        assert spans == sorted(spans, reverse=True)
    everyone = np.asarray(order_of_all(ranges.k_order))
    assert sorted(everyone) == list(range(4 * 5))
    np.testing.assert_array_equal(everyone[:4], 5 * np.arange(4) + np.asarray(ranges.k_order)[:, 0])


def test_ranges_are_split_over_devices_as_the_rows_are():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("data")
    ids = packed_rows(np.random.default_rng(4), 16, 2 * TILE, 60)
    split = jax.jit(jax.shard_map(segment_ranges, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False))(ids)
    whole = compiled(ids)
    assert jax.tree.structure(split) == jax.tree.structure(whole)
    for one, two in zip(jax.tree.leaves(split), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(one, two)
        assert isinstance(one, jnp.ndarray) and one.dtype == jnp.int32
