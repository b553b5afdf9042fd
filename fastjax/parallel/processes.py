"""Processes of one run, on one host or several: how they find each other, what they agree on, and how one leaves.

Every process has the whole program and some of the devices. The first, of index 0, is the primary: it alone writes what
a run leaves. What decides the program (a choice, a step to resume from) is agreed on, since processes that run
different programs wait for each other for ever.
"""

import collections
import contextlib
import ctypes
import importlib.util
import itertools
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import jax
import numpy as np
from jax._src import distributed  # the public functions look for devices, which a message must not
from jax.experimental import multihost_utils

from convert.errors import shown
from fastjax.errors import ConfigError
from fastjax.parallel.placing import fetched, spans_processes

#: Seconds without a sign of life after which a process counts as dead, and the others end.
HEARTBEAT_SECONDS = 30
#: Seconds that the first process stays after its error: with it goes the service of all, and they with that.
LAST_WORDS_SECONDS = 2.0
#: Seconds that a process stays after an error of a collective, which may come of another's end.
OTHERS_WORDS_SECONDS = 5.0
#: Where a process that ends by an error says so, and the seconds between two looks of the others.
_ENDED, _LOOK_SECONDS = "fastjax/ended", 1.0
#: Environment variables that give the number of processes under a cluster's launcher, in JAX's order: inside a job of
#: SLURM `mpirun` leaves both.
CLUSTERS = {"Open MPI": "OMPI_COMM_WORLD_SIZE", "SLURM": "SLURM_STEP_NUM_TASKS"}
#: Set by Open MPI before version 5; later processes ask MPI itself for their ranks.
_OLD_OPEN_MPI = "OMPI_MCA_orte_hnp_uri"
#: JAX's own variable: the GPUs of a process, which then stay as they are.
_JAX_GPUS = "JAX_LOCAL_DEVICE_IDS"
_TOLD_MILLISECONDS = 60_000
#: A week: JAX ends this process where another has died, and the watchdog where it waits too long for another.
_EVER_MILLISECONDS = 604_800_000
_PR_SET_PDEATHSIG = 1
_CALLS: dict[str, Iterator[int]] = collections.defaultdict(itertools.count)

T = TypeVar("T")


class Rank(NamedTuple):
    """A process among those of a run, as the option `--distributed` names it.

    Attributes:
        coordinator: host and port of the first process.
        count: of the processes.
        index: of this one, from 0.
        gpu: its GPU among those that it sees; None: one where other processes see the same, otherwise all.
    """

    coordinator: str
    count: int
    index: int
    gpu: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Rank":
        """Read HOST:PORT,COUNT,INDEX or HOST:PORT,COUNT,INDEX,GPU.

        Raises:
            ConfigError: it is of another form.
        """
        if found := re.fullmatch(r"([^,\s]+:(\d{1,5})),(\d{1,6}),(\d{1,6})(?:,(\d{1,4}))?", text, re.ASCII):
            port, count, index = map(int, found.group(2, 3, 4))
            if 0 < port < 2**16 and index < count:
                return cls(found[1], count, index, None if found[5] is None else int(found[5]))
        raise ConfigError(f"--distributed: expected HOST:PORT,COUNT,INDEX[,GPU] or nothing, got {shown(text, 80)}")

    def __str__(self) -> str:
        return ",".join(str(part) for part in self if part is not None)


def in_cluster() -> str | None:
    """The cluster's launcher that has started this process as one of several; None: none has."""
    counts = ((name, os.environ.get(variable, "")) for name, variable in CLUSTERS.items())
    return next((name for name, count in counts if re.fullmatch(r"\d{1,9}", count, re.ASCII) and int(count) > 1), None)


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
        given |= {"cluster_detection_method": "deactivate"}
        given |= {} if rank.gpu is None else {"local_device_ids": [rank.gpu]}
    elif in_cluster() == "Open MPI" and _OLD_OPEN_MPI not in os.environ:
        if importlib.util.find_spec("mpi4py") is None:
            raise ConfigError(
                "Open MPI 5: expected the package mpi4py, of which JAX asks a process's rank, found none: pip install "
                "mpi4py, or name each process with --distributed HOST:PORT,COUNT,INDEX"
            )
        given = {"cluster_detection_method": "mpi4py"}  # of its own accord JAX 0.10 would not look there
    try:
        jax.distributed.initialize(**given, heartbeat_timeout_seconds=HEARTBEAT_SECONDS)
        if rank is not None:
            _share_gpus(rank)
    except (ValueError, RuntimeError, ImportError) as error:
        name = "" if rank is None else f" {rank}"
        raise ConfigError(f"--distributed{name}: expected other processes of this run, got none: {error}") from error


def _share_gpus(rank: Rank) -> None:
    """Take one GPU, by the number of this process among those that see the same ones; alone it has all."""
    boot = Path("/proc/sys/kernel/random/boot_id")  # hosts may share a name
    parts = [socket.gethostname(), boot.read_text("ascii").strip() if boot.exists() else ""]
    parts += [os.environ.get(name, "") for name in ("CUDA_VISIBLE_DEVICES", _JAX_GPUS)]
    client = distributed.global_state.client
    assert client is not None, "joined"
    client.key_value_set(f"fastjax/gpus/{rank.index}", repr((*parts, rank.gpu)))
    if rank.gpu is not None or os.environ.get(_JAX_GPUS):
        return
    keys = (f"fastjax/gpus/{index}" for index in range(rank.count))
    seen = [client.blocking_key_value_get(key, _TOLD_MILLISECONDS) for key in keys]
    if (own := own_gpu(seen, rank.index)) is not None:
        jax.config.update("jax_cuda_visible_devices", str(own))


def own_gpu(seen: Sequence[str], index: int) -> int | None:
    """The GPU of a process among those that it sees; None: no other process sees them.

    Args:
        seen: what each process sees, in words.
        index: of the process.
    """
    others = [other for other, what in enumerate(seen) if what == seen[index]]
    return None if len(others) == 1 else others.index(index)


def leave(status: int) -> NoReturn:
    """End this process at once, and with it the others (`end_with_others`).

    An ordinary end waits, up to five minutes, for the other processes to end too, and they may wait for this one in a
    collective: neither they nor what has started them would know.

    Args:
        status: its exit status.
    """
    state = distributed.global_state
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # another has said so before
        if state.client is not None:
            state.client.key_value_set(_ENDED, f"{state.process_id} {status}")
    if state.process_id == 0:
        time.sleep(LAST_WORDS_SECONDS)
    _exit(status)


def end_with_others() -> None:
    """End this process when another ends by an error: a thread looks for that, as a collective would wait for ever."""
    if (client := distributed.global_state.client) is None:
        return

    def look() -> None:
        while True:
            time.sleep(_LOOK_SECONDS)
            try:
                rank, status = map(int, client.key_value_try_get(_ENDED).split())
            except jax.errors.JaxRuntimeError as error:
                if "NOT_FOUND" in str(error):
                    continue
                return  # the first process is gone, or this one is at its end
            if rank != distributed.global_state.process_id:
                print(f"fastjax: {rank_name()}: ended, as rank {rank} has with an error", file=sys.stderr)
                _exit(status)
            return

    threading.Thread(target=look, name="fastjax-others", daemon=True).start()


def wait_for_words() -> None:
    """Stay until `end_with_others`, or `fastjax launch`, ends this process, if another has ended before.

    An error of a collective comes of that, and says nothing about it.
    """
    time.sleep(OTHERS_WORDS_SECONDS)


def end_with_parent(parent: int) -> None:
    """Let the kernel end this process, by SIGKILL, when the one that has started it is gone. On Linux alone.

    Args:
        parent: its id: it may be gone already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent and not lives(parent):  # nor is there a wrapper between them
            os.kill(os.getpid(), signal.SIGKILL)


def lives(process: int) -> bool:
    """Whether a process of this host, which has Linux, is at work.

    Args:
        process: its id.
    """
    try:
        return Path(f"/proc/{process}/stat").read_text("ascii", "replace").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _exit(status: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def is_primary() -> bool:
    """Whether this process writes what a run leaves."""
    return jax.process_index() == 0


def rank_name() -> str | None:
    """The process and its host, for messages; None: it is the only one."""
    state = distributed.global_state
    if state.num_processes == 1:
        return None
    return f"rank {state.process_id} of {state.num_processes} on {socket.gethostname()}"


def barrier(name: str) -> None:
    """Wait for the other processes.

    Args:
        name: the same in all.
    """
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def in_turn(make: Callable[[str], T], word: Callable[[T], str]) -> T:
    """Call a function in the first process before the others, which find what it has stored.

    Args:
        make: called once in every process, with what the first one tells; there it is empty.
        word: of what the first process has made, for the others.
    """
    if not is_primary():
        return make(told("first", "")[0])
    result = make("")
    told("first", word(result))
    return result


def gathered_numbers(value: int) -> list[int]:
    """A number of every process, by its index.

    Args:
        value: this process's, below 2^62.
    """
    if jax.process_count() == 1:
        return [value]
    halves = np.array([value >> 31, value & 0x7FFFFFFF], np.int32)  # 64 bits would need another mode of JAX
    return [(int(high) << 31) | int(low) for high, low in multihost_utils.process_allgather(halves)]


def told(subject: str, text: str) -> list[str]:
    """Exchange a text with all processes; waits for all of them.

    No device takes part: one thread of a process may ask for each subject, also while devices wait for each other.

    Args:
        subject: of what is told: its calls come in the same order in all processes.
        text: this process's.
    """
    state = distributed.global_state
    if state.num_processes == 1:
        return [text]
    assert state.client is not None, "joined"
    place = f"fastjax/told/{subject}/{next(_CALLS[subject])}"
    state.client.key_value_set(f"{place}/{state.process_id}", text)
    keys = (f"{place}/{index}" for index in range(state.num_processes))
    return [state.client.blocking_key_value_get(key, _EVER_MILLISECONDS) for key in keys]


def on_host(tree: Any) -> Any:
    """Small arrays of a mesh of several processes, whole in each of them, as NumPy's; those of one process stay.

    Args:
        tree: arrays.
    """
    return jax.tree.map(lambda array: fetched(array) if spans_processes(array) else array, tree)
