"""Processes of one run, on one host or several: how they find each other, and what they agree on.

Every process has the whole program and some of the devices. The first, of index 0, is the primary: it alone writes what
a run leaves. What decides the program (a choice, a step to resume from) is agreed on, since processes that run
different programs wait for each other for ever.
"""

import os
import socket
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from fastjax.errors import ConfigError
from fastjax.parallel.placing import whole

#: Seconds without a sign of life after which a process counts as dead, and the others end.
HEARTBEAT_SECONDS = 30
#: Environment variables that give the number of processes under a cluster's launcher, which JAX knows to read.
CLUSTERS = {"SLURM": "SLURM_STEP_NUM_TASKS", "Open MPI": "OMPI_COMM_WORLD_SIZE"}

T = TypeVar("T")


class Rank(NamedTuple):
    """A process among those of a run, as the option `--distributed` names it.

    Attributes:
        coordinator: host and port of the first process.
        count: of the processes.
        index: of this one, from 0; also of its device on the host.
    """

    coordinator: str
    count: int
    index: int

    @classmethod
    def parse(cls, text: str) -> "Rank":
        """Read HOST:PORT,COUNT,INDEX.

        Raises:
            ConfigError: it is of another form.
        """
        try:
            coordinator, count, index = text.split(",")
            found = cls(coordinator, int(count), int(index))
            if not 0 <= found.index < found.count or not found.coordinator.rpartition(":")[2].isdecimal():
                raise ValueError
        except ValueError:
            raise ConfigError(f"--distributed: expected HOST:PORT,COUNT,INDEX or nothing, got {text[:80]}") from None
        return found

    def __str__(self) -> str:
        return ",".join(map(str, self))


def in_cluster() -> str | None:
    """The cluster's launcher that has started this process as one of several; None: none has."""
    return next((name for name, variable in CLUSTERS.items() if int(os.environ.get(variable) or 1) > 1), None)


def join(rank: Rank | None) -> None:
    """Join the other processes of a run; before JAX looks for devices.

    Args:
        rank: this process; None: as JAX finds in the environment (SLURM, Open MPI, Kubernetes).

    Raises:
        ConfigError: JAX finds no cluster, or the others do not come.
    """
    given: dict[str, Any] = {}
    if rank is not None:
        given = {"coordinator_address": rank.coordinator, "num_processes": rank.count, "process_id": rank.index}
        given |= {"local_device_ids": [rank.index], "cluster_detection_method": "deactivate"}
    try:
        jax.distributed.initialize(**given, heartbeat_timeout_seconds=HEARTBEAT_SECONDS)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"--distributed: expected other processes of this run, got none: {error}") from error


def is_primary() -> bool:
    """Whether this process writes what a run leaves."""
    return jax.process_index() == 0


def rank_name() -> str | None:
    """The process and its host, for messages; None: it is the only one."""
    if jax.process_count() == 1:
        return None
    return f"rank {jax.process_index()} of {jax.process_count()} on {socket.gethostname()}"


def barrier(name: str) -> None:
    """Wait for the other processes.

    Args:
        name: the same in all.
    """
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def in_turn(make: Callable[[], T]) -> T:
    """What a function makes, in the first process before the others: these find what it has kept.

    Args:
        make: called once in every process.
    """
    if jax.process_count() == 1:
        return make()
    if not is_primary():
        barrier("first")
    made = make()
    if is_primary():
        barrier("first")
    return made


def gathered_numbers(value: int) -> list[int]:
    """A number of every process, by its index.

    Args:
        value: this process's, below 2^62.
    """
    if jax.process_count() == 1:
        return [value]
    halves = np.array([value >> 31, value & 0x7FFFFFFF], np.int32)  # 64 bits would need another mode of JAX
    return [(int(high) << 31) | int(low) for high, low in multihost_utils.process_allgather(halves)]


def on_host(tree: Any) -> Any:
    """Arrays of a mesh of several processes, whole, as NumPy's; those of one process stay.

    Args:
        tree: arrays.
    """

    def fetch(array: Any) -> Any:
        if array.is_fully_addressable:
            return array
        return np.asarray(array if array.is_fully_replicated else whole(array))

    return jax.tree.map(fetch, tree)
