"""Attention of rows on four devices, each with two parts of them, against the reference on whole rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.attention import ring_attention, segment_ranges
from pallas_kernels.attention.reference import attention

N, B, S, H, K, D = 4, 2, 64, 4, 2, 8
#: Documents within a part, across parts and across devices, with padding between and behind them.
IDS = np.zeros((B, S), np.int32)
IDS[0, :3], IDS[0, 3:41], IDS[0, 44:60] = 1, 2, 3
IDS[1, :33], IDS[1, 33:] = 1, 2
#: float32: parts of a sum in another order.
TOLERANCE = 2e-6
CASES = {
    "plain": {},
    "documents in a window": {"documents": True, "sliding_window": 11},
    "window": {"sliding_window": 11, "scale": 0.7},
    "cap and sinks": {"documents": True, "logits_soft_cap": 1.5, "sinks": True},
}


def order():
    part = S // (2 * N)
    parts = [np.arange(number * part, (number + 1) * part) for number in range(2 * N)]
    return np.concatenate([np.concatenate([parts[d], parts[2 * N - 1 - d]]) for d in range(N)])


@pytest.mark.exhaustive("documents in a window", "cap and sinks")
@pytest.mark.parametrize("case", CASES)
def test_ring_equals_whole_rows(case):
    options = dict(CASES[case])
    ranges = segment_ranges(jnp.asarray(IDS)) if options.pop("documents", False) else None
    keys = jax.random.split(jax.random.key(0), 5)
    q, k, v, dout = (jax.random.normal(key, (B, S, heads, D)) for key, heads in zip(keys, (H, K, K, H), strict=False))
    sinks = jax.random.normal(keys[4], (H,)) if options.pop("sinks", False) else None
    there = order()
    back = np.argsort(there)

    def own(q, k, v, ranges, sinks):
        return ring_attention(q, k, v, axis="context", segment_ranges=ranges, sinks=sinks, **options)

    parts, mesh = P(None, "context"), Mesh(np.array(jax.devices()[:N]), ("context",))
    island = jax.shard_map(own, mesh=mesh, in_specs=(parts, parts, parts, P(), P()), out_specs=parts, check_vma=False)

    def on_devices(q, k, v, sinks):
        return island(q[:, there], k[:, there], v[:, there], ranges, sinks)[:, back]

    whole = functools.partial(attention, segment_ranges=ranges, **options)
    found, expected = (
        jax.jit(lambda *arrays, f=f: (f(*arrays), jax.vjp(f, *arrays)[1](dout)))(q, k, v, sinks)
        for f in (on_devices, lambda q, k, v, sinks: whole(q, k, v, sinks=sinks))
    )
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE * np.max(np.abs(other)))


def test_two_equal_parts_are_asked_for():
    q = jnp.zeros((1, 5, 1, 8))
    with pytest.raises(ValueError, match="two equal parts of a row on each device, got 5 tokens"):
        ring_attention(q, q, q, axis="context")
