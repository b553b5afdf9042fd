"""Arrays in the host's pinned memory, which the device reads and writes over the bus."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

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


def zeros_in_host_memory(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> Array:
    """Zeros in the host's pinned memory of the default device.

    Args:
        shape: theirs.
        dtype: theirs.
    """
    device = jnp.zeros((), dtype).sharding
    return jax.device_put(np.zeros(shape, dtype), device.with_memory_kind(_KIND))


def to_device_memory(array: Array) -> Array:
    """A copy of an array of the host's memory on its device."""
    return jax.device_put(array, array.sharding.with_memory_kind("device"))
