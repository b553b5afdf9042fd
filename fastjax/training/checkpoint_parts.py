"""The regions of an array that a process writes to a checkpoint and reads from it: those that its devices hold."""

from collections.abc import Sequence

import jax
import numpy as np

from fastjax.parallel import place
from fastjax.parallel.processes import is_primary
from fastjax.training.checkpoint_store import Region, StoredArray, chunk_of, whole_region


def held_regions(shape: Sequence[int], sharding: jax.sharding.Sharding) -> list[Region]:
    """The regions of an array that this process's devices hold, each once.

    Args:
        shape: of the array.
        sharding: of the array.
    """
    indices = sharding.addressable_devices_indices_map(tuple(shape)).values()
    return list(dict.fromkeys(_region(index, shape) for index in indices))


def put(values: Sequence[np.ndarray], shape: Sequence[int], sharding: jax.sharding.Sharding) -> jax.Array:
    """An array on its devices.

    Args:
        values: of `held_regions`.
        shape: of the array.
        sharding: of the array.
    """
    regions = held_regions(shape, sharding)
    if regions == [whole_region(shape)]:
        return place(values[0], sharding)
    by_region = dict(zip(regions, values, strict=True))
    return jax.make_array_from_callback(tuple(shape), sharding, lambda index: by_region[_region(index, shape)])


def copied_regions(array: jax.Array) -> StoredArray:
    """Copy a process's regions of an array to the host; each is written by the process with its first copy.

    Args:
        array: on the devices of several processes, or the same in each of them.
    """
    if array.is_fully_addressable:
        return whole(np.array(array), write=is_primary())
    shards = [shard for shard in array.addressable_shards if shard.replica_id == 0]
    for shard in shards:
        shard.data.copy_to_host_async()
    regions = [(_region(shard.index, array.shape), np.array(shard.data)) for shard in shards]
    chunk = chunk_of(array.sharding.shard_shape(array.shape), array.dtype.itemsize)
    return StoredArray(array.shape, array.dtype, chunk, regions)


def whole(array: np.ndarray, *, write: bool = True) -> StoredArray:
    """An array that one process writes.

    Args:
        array: of NumPy.
        write: whether it is this process.
    """
    regions = [(whole_region(array.shape), array)] if write else []
    return StoredArray(array.shape, array.dtype, chunk_of(array.shape, array.dtype.itemsize), regions)


def _region(index: Sequence[slice] | None, shape: Sequence[int]) -> Region:
    """A device's region, from its index in a sharding."""
    assert index is not None
    return tuple(one.indices(size)[:2] for one, size in zip(index, shape, strict=True))
