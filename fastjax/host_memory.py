"""Arrays in the host's pinned memory, which the device reads and writes over the bus."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec
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
        # Of a shape's place on a single device JAX forgets the memory when it traces, but not of one on a mesh.
        mesh = Mesh(np.array(jax.local_devices()[:1]), ("one",))
        place = NamedSharding(mesh, PartitionSpec(), memory_kind=_KIND)
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place)
    return jax.device_put(array, array.sharding.with_memory_kind(_KIND))


def zeros_in_host_memory(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> Array:
    """Zeros in the host's pinned memory of the default device.

    Args:
        shape: theirs.
        dtype: theirs.
    """
    return jax.device_put(np.zeros(shape, dtype), jax.memory.Space.Host)


def fetched(stack: Array, index: Any) -> Array:
    """One part of an array in the host's memory along its first axis, on the device; in a traced function.

    Args:
        stack: the array.
        index: of the part.
    """
    here = jax.lax.dynamic_slice_in_dim(stack, index, 1, allow_negative_indices=False)
    return jax.device_put(here, jax.memory.Space.Device)[0]


def shapes_of(function: Callable[..., Any], *arguments: Any) -> Any:
    """`jax.eval_shape`, with the memory that each array lies in.

    Args:
        function: pure.
        arguments: its own, arrays or shapes.
    """
    traced, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)

    def placed(shape: Any, aval: Any) -> Any:
        return to_host_memory(shape) if aval.memory_space == jax.memory.Space.Host else shape

    leaves, structure = jax.tree.flatten(shapes)
    return structure.unflatten(map(placed, leaves, traced.out_avals))


def to_device_memory(array: Array) -> Array:
    """A copy of an array of the host's memory on its device."""
    return jax.device_put(array, array.sharding.with_memory_kind("device"))
