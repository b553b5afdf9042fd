"""Each of several processes reads what its devices hold of a checkpoint; damage that one of them finds is all's."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fastjax.parallel import make_mesh
from fastjax.training import checkpoint, checkpoint_files, checkpoint_writing
from fastjax.training.cadence import Progress
from fastjax.training.checkpoint import Checkpoints
from fastjax.training.checkpoint_files import Unreadable, read_arrays, seal
from fastjax.training.checkpoint_parts import Parts, check_sums
from fastjax.training.checkpoint_sums import sum_checksum
from fastjax.training.checkpoint_writing import Stored, finish, write_parts

LAYERS, BLOCK = 6, 8192
SPECS = {
    "stack": P(None, "fsdp"),
    "codes": P("fsdp"),
    "table": P("fsdp", None),
    "norms": P(),
    "count": P(),
}


def state(mesh, seed=0):
    rng = np.random.default_rng(seed)
    arrays = {
        "stack": rng.normal(size=(LAYERS, 64, 24)).astype(np.float32),
        "codes": rng.integers(0, 255, (16, 5)).astype(np.uint8),
        "table": rng.normal(size=(1040, 8)).astype(jnp.bfloat16),
        "norms": rng.normal(size=(LAYERS, 24)).astype(np.float32),
        "count": np.int32(seed),
    }
    return jax.device_put(arrays, {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()})


@pytest.fixture
def small(monkeypatch):
    """Blocks and chunks for arrays of some kilobytes."""
    monkeypatch.setattr(checkpoint_writing, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(checkpoint_writing, "LEAST_CHUNK", 1024)
    monkeypatch.setattr(checkpoint_files, "BLOCK_BYTES", BLOCK)


@pytest.fixture(params=["sums", "CRCs"])
def saved(request, small, tmp_path):
    """A checkpoint as several processes write it, or as one does; its state, and what is known of it."""
    arrays, checkpoints = state(make_mesh(2, 4)), Checkpoints(tmp_path)
    if request.param == "sums":
        metadata = {"format": checkpoint.FORMAT, "arrays": checkpoint._described(arrays), "progress": {"step": 1}}
        sums = checkpoint._element_sums(arrays)
        metadata |= {"checksums": {name: sum_checksum(value) for name, value in sums.items()}}
        for process in range(2):
            parts = parts_of(arrays, PROCESSES["halves"], process)
            stored = {name: written(array, parts[name], process) for name, array in arrays.items()}
            write_parts(tmp_path / "1.unfinished", process, stored)
        finish(tmp_path / "1.unfinished", 2, metadata | {"checksum": seal(metadata)}, tmp_path / "1")
    else:
        checkpoints.save(arrays, Progress(1))
        checkpoints.wait()
    yield arrays, checkpoints, request.param
    checkpoints.close()


def written(array, parts, process):
    """A process writes the regions that it is the first to hold."""
    own = [region for region, held in parts.holders.items() if held[0] == process]
    values = [(region, np.asarray(array)[tuple(slice(*axis) for axis in region)]) for region in own]
    chunk = checkpoint_writing.chunk_of(array.sharding.shard_shape(array.shape), array.dtype.itemsize)
    return Stored(array.shape, array.dtype, chunk, values)


class Reads:
    """What is read of the files.

    Attributes:
        made: bytes of each read, by the shape of the array.
    """

    def __init__(self, monkeypatch):
        self.made, self._read = [], checkpoint_files._read
        monkeypatch.setattr(checkpoint_files, "_read", self)

    def __call__(self, stored, region):
        values = self._read(stored, region)
        self.made.append((stored.shape, values.nbytes))
        return values

    def bytes_of(self, array):
        return sum(size for shape, size in self.made if shape == array.shape)


def parts_of(arrays, process_of, process):
    return {
        name: Parts.of(a.shape, a.sharding, lambda device: process_of(device.id), process) for name, a in arrays.items()
    }


def read(checkpoints, arrays, parts):
    """(parts, sums) as a process reads them, and the checksums."""
    checksums = checkpoints.metadata(1)["checksums"]
    regions = {name: one.own for name, one in parts.items()}
    folder = checkpoints.folder / "1"
    return *read_arrays(folder, checkpoint._described(arrays), checksums, regions, lambda _, p: p), checksums


#: Processes by device: neighbours, and in turns.
PROCESSES = {
    "halves": lambda device: device // 4,
    "turns": lambda device: device % 2,
    "pairs": lambda device: device // 2,
}


@pytest.mark.parametrize(
    ("shape", "of", "share"),
    [((1, 8), "halves", 2), ((1, 8), "turns", 2), ((2, 4), "pairs", 2), ((2, 4), "halves", 1)],
    ids=str,
)
def test_a_process_reads_the_parts_of_its_devices(saved, monkeypatch, shape, of, share):
    """Of sums nothing else; where the files have CRCs all, of which it never holds more than a chunk besides."""
    arrays, checkpoints, kind = saved
    like = state(make_mesh(*shape), 1)
    for process in (0, 1):
        reads, parts = Reads(monkeypatch), parts_of(like, PROCESSES[of], process)
        found, sums, _ = read(checkpoints, arrays, parts)
        for name, array in arrays.items():
            for values, region in zip(found[name], parts[name].own, strict=True):
                np.testing.assert_array_equal(values, np.asarray(array)[tuple(slice(*axis) for axis in region)])
            held = sum(values.nbytes for values in found[name])
            assert held == array.nbytes // (1 if SPECS[name] == P() else share)
            assert reads.bytes_of(array) == (held if kind == "sums" else array.nbytes)
        assert set(sums) == (set(arrays) if kind == "sums" else set())
        assert max(size for _, size in reads.made) <= BLOCK  # a layer, or so much of the others


def judged(checkpoints, arrays, process_of, count, *, change=lambda process, sums: None, errors=()):
    """What each process says of what it has read: None, or the message."""
    vectors, meet = {}, threading.Barrier(count, timeout=20)

    def one(process):
        parts = parts_of(arrays, process_of, process)
        _, sums, checksums = read(checkpoints, arrays, parts)
        change(process, sums)
        error = Unreadable(checkpoints.folder, "no such file") if process in errors else None

        def gather(vector):
            vectors[process] = vector
            meet.wait()
            return np.stack([vectors[number] for number in range(count)])

        try:
            check_sums(checkpoints.folder, checksums, parts, sums if error is None else {}, error, gather)
        except Unreadable as found:
            return str(found).partition(" cannot be read: ")[2]

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


@pytest.mark.parametrize("saved", ["sums"], indirect=True)
@pytest.mark.parametrize(
    ("shape", "of", "count"), [((1, 8), "turns", 2), ((2, 4), "pairs", 4), ((2, 4), "halves", 2)], ids=str
)
def test_what_one_process_reads_wrong_all_refuse(saved, shape, of, count):
    arrays, checkpoints, _ = saved
    like = functools.partial(judged, checkpoints, state(make_mesh(*shape), 1), PROCESSES[of], count)
    assert like() == [None] * count
    for wrong in range(count):  # also one that reads what another has read right

        def change(process, sums, wrong=wrong):
            if process == wrong:
                sums["stack"][-1] ^= 4

        answers = like(change=change)
        alone = (shape, of) == ((2, 4), "halves")  # each process has all and knows by itself
        assert answers[wrong].startswith("the array stack is damaged: expected the checksum sum-")
        others = {f"rank {wrong} finds it damaged"} if alone else {answers[wrong]}
        assert {answer for process, answer in enumerate(answers) if process != wrong} == others
        told = like(errors=(wrong,))
        assert told[wrong] == "no such file"
        assert {said for process, said in enumerate(told) if process != wrong} == {f"rank {wrong} finds it damaged"}


@pytest.mark.parametrize("shape", [(2, 4), (8, 1), (1, 2), (1, 1)], ids=str)
def test_a_checkpoint_goes_on_on_any_mesh(saved, shape):
    arrays, checkpoints, _ = saved
    like = state(make_mesh(*shape), 1)
    found = checkpoints.load(1, like)
    for name, array in found.items():
        assert array.sharding.is_equivalent_to(like[name].sharding, array.ndim)
        np.testing.assert_array_equal(array, arrays[name])


def test_large_arrays_are_stored_in_layers_and_rows(saved):
    _, checkpoints, kind = saved
    stored = {name: checkpoint_files._open(checkpoints.folder / "1", name) for name in SPECS}
    chunks = {name: tuple(array.chunk_layout.read_chunk.shape or ()) for name, array in stored.items()}
    rows = 64 if kind == "CRCs" else 16
    assert chunks["stack"] == (1, rows, 24)
    table = chunks["table"][0] * chunks["table"][1] * 2
    assert 1024 <= table <= BLOCK


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((80, 4096, 4096), (1, 4096, 4096)),
        ((80, 4096), (80, 4096)),
        ((4000, 16, 16), (4000, 16, 16)),
        ((128256, 4096), (4008, 4096)),
        ((151643, 4096), (151643, 4096)),  # a prime
        ((2**26,), (2**24,)),
        ((), ()),
    ],
    ids=str,
)
def test_chunks(shape, expected):
    assert checkpoint_writing.chunk_of(shape, 4) == expected


def test_an_array_that_was_stored_in_one_piece_is_decoded_once(tmp_path, monkeypatch):
    """As earlier versions stored all."""
    checkpoints, arrays = Checkpoints(tmp_path), state(make_mesh(1, 4))
    checkpoints.save(arrays, Progress(1))
    checkpoints.wait()
    checkpoints.close()
    monkeypatch.setattr(checkpoint_files, "BLOCK_BYTES", 64)
    reads = Reads(monkeypatch)
    parts = parts_of(state(make_mesh(1, 8)), PROCESSES["halves"], 1)
    found, _, _ = read(checkpoints, arrays, parts)
    for array in arrays.values():
        assert reads.made.count((array.shape, array.nbytes)) == 1
    np.testing.assert_array_equal(np.concatenate(found["stack"], 1), np.asarray(arrays["stack"])[:, 32:])
