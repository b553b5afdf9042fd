"""Reading the other cards' memory: to the bit, on fresh random arrays, with poisoned results."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import nf4, shard_gather
from pallas_kernels.shard_gather import Shared
from tests.pallas_kernels.shard_gather.support import island, stacks
from tests.support.matrices import LLAMA_8B, WHOLE_ROWS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu" or jax.device_count() < 2, reason="needs two GPUs"),
]


def test_gathers_a_layer_of_each_stack():
    arrays = stacks(2)
    gather = functools.partial(shard_gather.gather, axis_name="fsdp", implementation="mosaic")
    gathered = island(2, lambda layer, *own: gather(own, layer), arrays)
    jax.block_until_ready([jnp.full(array.shape, jnp.nan, jnp.float32) for array in arrays])
    for layer in (0, 2):
        for found, stack in zip(gathered(layer, *arrays), arrays, strict=True):
            for shard in found.addressable_shards:
                np.testing.assert_array_equal(shard.data, np.asarray(stack[layer]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", [matrix.shape for matrix in (*WHOLE_ROWS, *LLAMA_8B)])
def test_codes_decode_where_they_lie(shape, dtype):
    rng = np.random.default_rng()
    out, columns = shape[0] + shape[0] % 2, shape[1]
    codes = jnp.asarray(rng.integers(0, 256, (2, out, columns // 2), dtype=np.uint8))
    absmax = jnp.asarray(np.exp(rng.normal(-4, 2, out * columns // 64)), jnp.float32)
    decode = functools.partial(nf4.dequantize, shape=(out, columns), dtype=dtype)
    shared = island(2, lambda layer, own: decode(Shared(own, layer, "fsdp", 2), absmax), [codes])
    jax.block_until_ready([jnp.full((out, columns), jnp.nan, dtype) for _ in range(2)])
    expected = np.asarray(decode(codes[1], absmax, implementation="xla"))
    for shard in shared(1, codes).addressable_shards:
        found = np.asarray(shard.data)
        unsigned = f"uint{8 * found.dtype.itemsize}"
        np.testing.assert_array_equal(found.view(unsigned), expected.view(unsigned))
