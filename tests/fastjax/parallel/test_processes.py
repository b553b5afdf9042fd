"""How processes find each other, and which GPU each takes: what JAX is told, and what it reads by itself."""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import types

import jax
import pytest
from jax._src import clusters
from jax.errors import JaxRuntimeError

from fastjax.errors import ConfigError
from fastjax.parallel import processes
from fastjax.parallel.processes import (
    Rank,
    end_with_others,
    end_with_parent,
    in_cluster,
    join,
    leave,
    own_gpu,
    rank_name,
)

#: A process of each launcher: the fourth of the second of two hosts with 8 GPUs.
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "16", "OMPI_COMM_WORLD_RANK": "11", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
OLD_OPEN_MPI = {**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_NTASKS": "16", "SLURM_STEP_NUM_TASKS": "16"}
SLURM |= {"SLURM_PROCID": "11", "SLURM_LOCALID": "3"}


class Store:
    """JAX's store of a run whose processes are on two hosts in turn; each says what this one has said, of its host."""

    def __init__(self, first=8):
        self.own, self.first = None, first

    def key_value_set(self, key, value):
        self.own = value

    def blocking_key_value_get(self, key, milliseconds):
        return self.own if int(key.rpartition("/")[2]) >= self.first else "another host"


@pytest.fixture
def joined(monkeypatch):
    """Lets this process join as it believes; the arguments of `jax.distributed.initialize`, and the settings of JAX."""
    for name in (*OLD_OPEN_MPI, *SLURM, "JAX_LOCAL_DEVICE_IDS"):
        monkeypatch.delenv(name, raising=False)
    given, settings, store = {}, {}, Store()
    monkeypatch.setattr(jax.distributed, "initialize", lambda **arguments: given.update(arguments))
    monkeypatch.setattr(processes.distributed, "global_state", types.SimpleNamespace(client=store))
    monkeypatch.setattr(jax.config, "update", settings.__setitem__)
    return types.SimpleNamespace(given=given, settings=settings, store=store)


@pytest.mark.parametrize(
    ("text", "rank"),
    [
        ("node1:4000,16,3", Rank("node1:4000", 16, 3)),
        ("10.0.0.1:65535,1,0,7", Rank("10.0.0.1:65535", 1, 0, 7)),
        ("[::1]:1,2,1", Rank("[::1]:1", 2, 1)),
    ],
)
def test_a_rank_is_read_and_written(text, rank):
    assert Rank.parse(text) == rank
    assert str(rank) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "node1", "node1:4000", "node1:4000,2", "node1:4000,2,0,0,0", "node1:4000,2,", "node1:4000,2,0,"),
        *("4000,2,0", ":4000,2,0", "node1:,2,0", "node1:0,2,0", "node1:65536,2,0", "no de:4000,2,0"),
        *("node1:4000,2,2", "node1:4000,0,0", "node1:4000,2,-1", "node1:4000,-2,0", "node1:4000,2,0,-1"),
        *("node1:4000, 2,0", "node1:4000,2,0\n", "node1:4000,1_0,0", "node1:4000,٣,0", "node1:4000,2e0,0"),
        *("node1:4000," + "9" * 5000 + ",0", "\x1b[2J" * 100),
    ],
)
def test_what_is_no_rank(text):
    with pytest.raises(
        ConfigError, match=r"^--distributed: expected HOST:PORT,COUNT,INDEX\[,GPU\] or nothing, got '"
    ) as e:
        Rank.parse(text)
    assert len(str(e.value)) < 200 and "\x1b" not in str(e.value)


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, None),
        (OPEN_MPI, "Open MPI"),
        (SLURM, "SLURM"),
        ({**SLURM, **OPEN_MPI}, "Open MPI"),
        ({"OMPI_COMM_WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "1"}, None),
        *(({"SLURM_STEP_NUM_TASKS": count}, None) for count in ("", "many", "-2", "1e3", "²", "9" * 5000)),
    ],
)
def test_the_cluster_that_has_started_several(monkeypatch, joined, variables, found):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert in_cluster() == found


@pytest.mark.parametrize(
    ("hosts", "gpus"),
    [
        ([*"a" * 8, *"b" * 8], [*range(8), *range(8)]),
        ([*"ab" * 8], [n // 2 for n in range(16)]),
        (["a", "b"], [None, None]),
        (["a", "a", "b"], [0, 1, None]),
    ],
)
def test_processes_of_a_host_share_its_gpus(hosts, gpus):
    assert [own_gpu(hosts, index) for index in range(len(hosts))] == gpus


@pytest.mark.parametrize(
    ("text", "devices", "gpu"),
    [
        ("node1:4000,16,11", None, "3"),  # the fourth of its host
        ("node1:4000,16,8", None, "0"),
        ("node1:4000,9,8", None, None),  # alone on its host
        ("node1:4000,16,11,5", [5], None),
    ],
)
def test_a_process_that_is_started_by_hand(joined, text, devices, gpu):
    """It is told neither of a GPU that its host does not have, nor of another's."""
    join(rank := Rank.parse(text))
    local = {} if devices is None else {"local_device_ids": devices}
    assert joined.given == local | {
        "coordinator_address": "node1:4000",
        "num_processes": rank.count,
        "process_id": rank.index,
        "cluster_detection_method": "deactivate",
        "heartbeat_timeout_seconds": 30,
    }
    assert joined.settings == ({} if gpu is None else {"jax_cuda_visible_devices": gpu})


def test_gpus_named_for_jax_stay(monkeypatch, joined):
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "6,7")
    join(Rank.parse("node1:4000,16,11"))
    assert joined.settings == {} and "'6,7'" in joined.store.own


def test_who_sees_other_gpus_has_none_of_these(monkeypatch, joined):
    said = []
    for visible in ("0,1", "2,3"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        join(Rank.parse("node1:4000,16,11"))
        said.append(joined.store.own)
    assert said[0] != said[1]


@pytest.mark.parametrize(
    ("variables", "method"), [(SLURM, {}), (OLD_OPEN_MPI, {}), (OPEN_MPI, {"cluster_detection_method": "mpi4py"})]
)
def test_what_jax_is_told_in_a_cluster(monkeypatch, joined, variables, method):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "mpi4py")
    join(None)
    assert joined.given == {"heartbeat_timeout_seconds": 30} | method and joined.settings == {}


def test_open_mpi_5_without_mpi4py(monkeypatch, joined):
    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="Open MPI 5: expected the package mpi4py.*pip install mpi4py, or name each"):
        join(None)


def test_nobody_is_there(monkeypatch, joined):
    def fail(**arguments):
        raise RuntimeError("DEADLINE_EXCEEDED")

    monkeypatch.setattr(jax.distributed, "initialize", fail)
    for rank, named in ((None, "--distributed"), (Rank.parse("node1:4000,16,11"), "--distributed node1:4000,16,11")):
        with pytest.raises(ConfigError, match=f"^{named}: expected other processes of this run.*DEADLINE_EXCEEDED"):
            join(rank)


@pytest.mark.parametrize("variables", [SLURM, OLD_OPEN_MPI])
def test_jax_gives_each_process_of_a_cluster_the_gpu_of_its_rank_on_the_host(monkeypatch, joined, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = clusters.ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, 1)
    assert found[1:] == (16, 11, [3])
    assert clusters.K8sCluster.get_local_process_id() is None, "a pod has all that it sees"


class Words:
    """The part of JAX's store in which one process tells the others that it has ended."""

    def __init__(self):
        self.told = {}

    def key_value_set(self, key, value):
        if key in self.told:
            raise JaxRuntimeError("ALREADY_EXISTS")
        self.told[key] = value

    def key_value_try_get(self, key):
        if key not in self.told:
            raise JaxRuntimeError("NOT_FOUND")
        return self.told[key]


class Gone(BaseException):
    """The end of a process."""


@pytest.mark.parametrize(("index", "seconds"), [(0, [processes.LAST_WORDS_SECONDS]), (3, [])])
def test_the_first_process_leaves_last_and_others_follow_with_its_status(monkeypatch, capsys, index, seconds):
    state, slept, left = types.SimpleNamespace(num_processes=4, process_id=index, client=Words()), [], []

    def end(status):
        left.append((state.process_id, status))
        raise Gone

    monkeypatch.setattr(processes.distributed, "global_state", state)
    monkeypatch.setattr(processes.time, "sleep", slept.append)
    monkeypatch.setattr(processes.os, "_exit", end)
    with pytest.raises(Gone):
        leave(5)
    assert rank_name().startswith(f"rank {index} of 4 on ")
    assert (slept, left) == (seconds, [(index, 5)])
    slept.clear()
    state.process_id = 2
    monkeypatch.setattr(processes.threading, "Thread", lambda target, **options: types.SimpleNamespace(start=target))
    with pytest.raises(Gone):
        end_with_others()
    assert slept == [processes._LOOK_SECONDS] and left[1:] == [(2, 5)]
    assert (
        f"rank 2 of 4 on {socket.gethostname()}: ended, as rank {index} has with an error\n" in capsys.readouterr().err
    )
    with pytest.raises(Gone):
        leave(1)  # of two that fail the first has told
    assert left[2:] == [(2, 1)] and state.client.told == {processes._ENDED: f"{index} 5"}
    state.process_id = index
    end_with_others()  # it is itself that has ended


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere processes do not end with another")
def test_a_process_whose_launcher_ended_before_it_asked_ends(monkeypatch):
    asked, killed = [], []
    library = types.SimpleNamespace(prctl=lambda *arguments: asked.append(arguments))
    monkeypatch.setattr(processes.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(processes.os, "kill", lambda *arguments: killed.append(arguments))
    end_with_parent(os.getppid())
    end_with_parent(os.getpid())  # which lives: there is a wrapper between them
    assert killed == []
    gone = subprocess.Popen(["true"])
    os.waitid(os.P_PID, gone.pid, os.WEXITED | os.WNOWAIT)
    end_with_parent(gone.pid)  # which nobody has waited for yet
    gone.wait()
    end_with_parent(gone.pid)
    assert killed == [(os.getpid(), signal.SIGKILL)] * 2
    assert asked == [(1, signal.SIGKILL)] * 4
