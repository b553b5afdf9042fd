"""An embedding table in the host's memory: the device holds the rows of a batch alone.

The host gathers the rows, in a part of the program that XLA runs there, and sends them: 64 MiB a step for 8,192 tokens
of width 4,096, where the table of 128,256 tokens takes 1 GiB.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.experimental import compute_on
from jaxtyping import Array, Float, Int

#: jax 0.10 has it beside a context manager of the shorter name.
_compute_on: Any = getattr(compute_on, "compute_on2", compute_on.compute_on)
_KIND = "pinned_host"


def in_host_memory(array: Any) -> bool:
    """Whether an array, a traced one or a shape lies in the host's memory."""
    if isinstance(array, Tracer):
        return jax.typeof(array).memory_space == jax.memory.Space.Host
    return getattr(getattr(array, "sharding", None), "memory_kind", None) == _KIND


def to_host_memory(array: Any) -> Any:
    """A copy in the host's pinned memory, of the array's device; of a shape, the shape of such a one."""
    if isinstance(array, jax.ShapeDtypeStruct):
        place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0], memory_kind=_KIND)
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place)
    return jax.device_put(array, array.sharding.with_memory_kind(_KIND))


def to_device_memory(array: Array) -> Array:
    """A copy of an array of the host's memory on its device."""
    return jax.device_put(array, array.sharding.with_memory_kind("device"))


def take_rows(table: Float[Array, "V E"], tokens: Int[Array, "B S"]) -> Float[Array, "B S E"]:
    """table[tokens] on the device, wherever the table is.

    Args:
        table: the embeddings; frozen where it is in the host's memory.
        tokens: token ids.
    """
    if not in_host_memory(table):
        return jnp.take(table, tokens, axis=0)

    def gather(table: Array, tokens: Array) -> Array:
        return jnp.take(table, tokens, axis=0, mode="clip")

    gather = _compute_on(gather, compute_type="device_host", out_memory_spaces=jax.memory.Space.Host)
    rows = gather(table, jax.device_put(tokens, jax.memory.Space.Host))
    return jax.device_put(rows, jax.memory.Space.Device)
