"""A layer of stacks that several devices share, on CPU devices: the values, and who serves whom."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat, dispatch, nf4, shard_gather
from pallas_kernels.shard_gather import Shared
from tests.pallas_kernels.shard_gather.support import island, stacks

H200 = dispatch.Target("cuda", "NVIDIA H200", (9, 0), 132)


@pytest.mark.parametrize("devices", [2, 8])
def test_gathers_a_layer_of_each_stack(devices):
    arrays = stacks(devices)
    gathered = island(devices, lambda layer, *own: shard_gather.gather(own, layer, "fsdp"), arrays)
    for layer in (0, 2):
        for found, stack in zip(gathered(layer, *arrays), arrays, strict=True):
            np.testing.assert_array_equal(found, np.asarray(stack[layer]))
            assert found.dtype == stack.dtype


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_products_with_shared_codes_equal_those_with_whole_ones(dtype):
    shape, rng = (256, 128), np.random.default_rng()
    codes = jnp.asarray(rng.integers(0, 256, (3, shape[0], shape[1] // 2), dtype=np.uint8))
    absmax = jnp.asarray(rng.uniform(0.01, 1, shape[0] * shape[1] // 64), jnp.float32)
    x, dy = (jnp.asarray(rng.normal(size=(5, size)), dtype) for size in shape[::-1])

    def both(codes):
        y, pullback = jax.vjp(lambda x: nf4.matmul(x, codes, absmax, shape=shape), x)
        return y, *pullback(dy)

    def shared(layer, own):
        codes = Shared(own, layer, "fsdp", 4)
        assert (codes.shape, codes.dtype) == ((256, 64), jnp.uint8)
        return *both(codes), nf4.dequantize(codes, absmax, shape=shape, dtype=dtype), shard_gather.whole(codes)

    found = island(4, shared, [codes])(1, codes)
    expected = *jax.jit(both)(codes[1]), nf4.dequantize(codes[1], absmax, shape=shape, dtype=dtype), codes[1]
    for here, there in zip(found, expected, strict=True):
        np.testing.assert_array_equal(here, there)


def test_the_codes_decode_to_float8_too():
    codes, absmax = jnp.arange(2 * 64 * 64, dtype=jnp.uint8).reshape(2, 64, 64), jnp.ones(128, jnp.float32)

    def decode(codes):
        return [nf4.dequantize_float8(codes, absmax, shape=(64, 128), transposed=flag) for flag in (False, True)]

    found = island(2, lambda layer, own: decode(Shared(own, layer, "fsdp", 2)), [codes])(1, codes)
    for here, there in zip(jax.tree.leaves(found), jax.tree.leaves(decode(codes[1])), strict=True):
        np.testing.assert_array_equal(here.astype(jnp.float32), there.astype(jnp.float32))


def test_a_forced_implementation_that_cannot_serve_says_why():
    arrays = stacks(2)
    gathered = island(2, lambda i, *own: shard_gather.gather(own, i, "fsdp", implementation="mosaic"), arrays)
    with pytest.raises(NotImplementedError, match="'mosaic' cannot serve this call: it needs an NVIDIA GPU"):
        gathered(0, *arrays)


def test_who_reads_other_devices_memory(monkeypatch):
    monkeypatch.setattr(compat, "JAX_VERSION", (0, 11, 2))
    monkeypatch.setattr(dispatch, "target", lambda: H200)
    for shape, chosen in (((4, 16, 128), "mosaic"), ((4, 30, 100), "xla")):
        assert shard_gather.REGISTRY.choose(None, shape=shape, dtype=jnp.uint8) == chosen
    a100 = dispatch.Target("cuda", "NVIDIA A100", (8, 0), 108)
    assert "compute capability 9.0" in str(shard_gather.why_not_peers(a100))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert "one process has all GPUs" in str(shard_gather.why_not_peers(H200))
    monkeypatch.setattr(compat, "JAX_VERSION", (0, 10, 2))
    assert "it needs jax 0.11" in str(shard_gather.why_not_peers(H200))
