"""The kernels that read other devices' memory, as the last of several devices, in Mosaic's interpreter."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.nf4 import mosaic_sm90, reference
from pallas_kernels.shard_gather import Shared
from pallas_kernels.shard_gather.mosaic_sm90 import gather
from tests.pallas_kernels.shard_gather.support import stacks
from tests.support.interpreter import mosaic_interpreter


def of_devices(stack, devices):
    """[L, devices · rows, …] as the interpreter has it: [devices, L, rows, …]."""
    return jnp.moveaxis(stack.reshape(len(stack), devices, -1, *stack.shape[2:]), 1, 0)


@pytest.mark.parametrize("devices", [2, 3])
def test_a_layer_of_each_stack_is_whole(devices):
    for _, group in itertools.groupby(stacks(devices), key=lambda stack: stack.dtype):
        group = list(group)
        with mosaic_interpreter() as interpret:
            shards = [of_devices(stack, devices) for stack in group]
            found = gather(shards, jnp.int32(2), axis_name="fsdp", interpret=interpret)
        for here, stack in zip(found, group, strict=True):
            np.testing.assert_array_equal(here, stack[2])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows", [16, 33])
def test_codes_decode_where_they_lie(rows, dtype):
    devices, rng = 3, np.random.default_rng()
    blocks = devices * rows
    codes = jnp.asarray(rng.integers(0, 256, (2, blocks, 32), dtype=np.uint8))
    absmax = jnp.asarray(rng.uniform(0.01, 1, blocks), jnp.float32)
    shared = Shared(of_devices(codes, devices), jnp.int32(1), "fsdp", devices)
    with mosaic_interpreter() as interpret:
        found = mosaic_sm90.dequantize_shared(shared, absmax, dtype=dtype, tile=16, interpret=interpret)
    expected = reference.dequantize(codes[1], absmax, shape=(blocks, 64), dtype=dtype, order="split")
    np.testing.assert_array_equal(found, expected)
