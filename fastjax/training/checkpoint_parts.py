"""The parts of a state's arrays that a process reads from a checkpoint, and what the processes agree on about them.

A process reads the regions that its devices hold, each once. No process sees all of an array then, so the sums of the
regions are added up over the processes: where several hold the same region, over each choice of holders in which every
region is there once, so that what each of them has read counts in some sum. All come to the same judgement, and go on
from the same checkpoint.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from fastjax.parallel import place
from fastjax.parallel.processes import is_primary
from fastjax.training.checkpoint_files import Unreadable, check_sum
from fastjax.training.checkpoint_sums import SUM, Region, whole_region
from fastjax.training.checkpoint_writing import Stored, chunk_of


class Parts(NamedTuple):
    """The regions of an array.

    Attributes:
        shape: of the array.
        holders: the processes that hold each region, ascending.
        process: this one.
    """

    shape: tuple[int, ...]
    holders: Mapping[Region, tuple[int, ...]]
    process: int

    @classmethod
    def of(
        cls,
        shape: Sequence[int],
        sharding: jax.sharding.Sharding,
        process_of: Callable[[Any], int] = lambda device: device.process_index,
        process: int | None = None,
    ) -> "Parts":
        """The regions of an array by its sharding.

        Args:
            shape: of the array.
            sharding: of the array.
            process_of: the process of a device.
            process: this one; None: JAX's.
        """
        holders: dict[Region, set[int]] = {}
        for device, index in sharding.devices_indices_map(tuple(shape)).items():
            holders.setdefault(region_of(index, shape), set()).add(process_of(device))
        process = jax.process_index() if process is None else process
        return cls(tuple(shape), {region: tuple(sorted(held)) for region, held in holders.items()}, process)

    @property
    def own(self) -> list[Region]:
        """The regions that this process reads."""
        return [region for region, held in self.holders.items() if self.process in held]

    @property
    def shared(self) -> bool:
        """Whether a process holds less than all of the array; the same in all processes."""
        return len(set(self.holders.values())) > 1

    def shares(self, sums: Sequence[int]) -> list[int]:
        """What this process adds to each of the sums over all regions.

        Args:
            sums: of its own regions.
        """
        found = dict(zip(self.own, sums, strict=True))
        copies = max(map(len, self.holders.values()))
        return [
            sum(found[region] for region, held in self.holders.items() if held[copy % len(held)] == self.process)
            for copy in range(copies)
        ]


def region_of(index: Sequence[slice], shape: Sequence[int]) -> Region:
    """A device's part of an array.

    Args:
        index: as a sharding gives it.
        shape: of the array.
    """
    return tuple(one.indices(size)[:2] for one, size in zip(index, shape, strict=True))


def own_parts(array: jax.Array) -> Stored:
    """Copy a process's parts of an array to the host; each part is written by the process with its first copy.

    Args:
        array: on the devices of several processes, or the same in each of them.
    """
    if array.is_fully_addressable:
        return whole(np.array(array), write=is_primary())
    shards = [shard for shard in array.addressable_shards if shard.replica_id == 0]
    for shard in shards:
        shard.data.copy_to_host_async()
    parts = [(region_of(shard.index, array.shape), np.array(shard.data)) for shard in shards]
    chunk = chunk_of(array.sharding.shard_shape(array.shape), array.dtype.itemsize)
    return Stored(array.shape, array.dtype, chunk, parts)


def whole(array: np.ndarray, *, write: bool = True) -> Stored:
    """An array that one process writes.

    Args:
        array: of NumPy.
        write: whether it is this process.
    """
    parts = [(whole_region(array.shape), array)] if write else []
    return Stored(array.shape, array.dtype, chunk_of(array.shape, array.dtype.itemsize), parts)


def put(values: Sequence[np.ndarray], parts: Parts, sharding: jax.sharding.Sharding) -> jax.Array:
    """An array on its devices.

    Args:
        values: of this process's regions.
        parts: the array's.
        sharding: of the array.
    """
    if parts.own == [whole_region(parts.shape)]:
        return place(values[0], sharding)
    found = dict(zip(parts.own, values, strict=True))

    def part(index: Any) -> np.ndarray:
        return found[region_of(index, parts.shape)]

    return jax.make_array_from_callback(parts.shape, sharding, part)


def check_sums(
    folder: Path,
    checksums: Mapping[str, str] | None,
    parts: Mapping[str, Parts],
    sums: Mapping[str, Sequence[int]],
    error: Unreadable | None = None,
    gather: Callable[[np.ndarray], np.ndarray] | None = None,
) -> None:
    """Check, in all processes together, what each of them has read.

    Args:
        folder: of the checkpoint.
        checksums: name → checksum; None: it has none.
        parts: of all arrays.
        sums: name → the sums of this process's regions, of those that it has read.
        error: why this process could not read all.
        gather: takes this process's uint32 [n] to those of all, [processes, n]; None: there is no other process.

    Raises:
        Unreadable: the checkpoint is damaged, in what some process has read.
    """
    try:
        if error is not None:
            raise error
        for name in sums:
            if not parts[name].shared:
                check_sum(folder, name, checksums or {}, sum(sums[name]))
    except Unreadable as found:
        if gather is None:
            raise
        error = found
    if gather is None:
        return
    summed = [name for name in parts if parts[name].shared and (checksums or {}).get(name, "").startswith(SUM)]
    given = [parts[name].shares(sums.get(name, [0] * len(parts[name].own))) for name in summed]
    vector = np.array([error is not None, *(one % 2**32 for each in given for one in each)], np.uint32)
    every = gather(vector).astype(np.uint64)
    if error is not None:
        raise error
    if every[:, 0].any():
        raise Unreadable(folder, f"rank {int(every[:, 0].argmax())} finds it damaged")
    totals = iter(every[:, 1:].sum(0).tolist())
    for name, each in zip(summed, given, strict=True):
        for _ in each:
            check_sum(folder, name, checksums or {}, next(totals))


def gather_all(values: np.ndarray) -> np.ndarray:
    """The values of all processes, [processes, n]; the processes call this together.

    Args:
        values: this process's, uint32 [n].
    """
    return np.asarray(multihost_utils.process_allgather(values))
