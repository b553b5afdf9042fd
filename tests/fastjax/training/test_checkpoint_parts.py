"""Each process writes and reads what its devices hold of a checkpoint; damage that one of them finds is all's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fastjax.parallel import make_mesh
from fastjax.training import checkpoint, checkpoint_parts, checkpoint_store
from fastjax.training.cadence import Progress
from fastjax.training.checkpoint import Checkpoints
from fastjax.training.checkpoint_store import StoredArray, Unreadable, finish, seal, write_arrays

LAYERS = 6
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


class OfProcess:
    """A sharding as one of two processes sees it, with the devices of every second row of the mesh or of its half."""

    def __init__(self, sharding, mine):
        self._sharding, self._mine = sharding, mine

    def addressable_devices_indices_map(self, shape):
        every = self._sharding.devices_indices_map(shape)
        return {device: index for device, index in every.items() if self._mine(device.id)}


@pytest.fixture(params=["two processes", "one process"])
def saved(request, monkeypatch, tmp_path):
    """A checkpoint, with chunks for arrays of some kilobytes; its state."""
    monkeypatch.setattr(checkpoint_store, "MOST_CHUNK", 8192)
    monkeypatch.setattr(checkpoint_store, "LEAST_CHUNK", 1024)
    arrays, checkpoints = state(make_mesh(2, 4)), Checkpoints(tmp_path)
    if request.param == "two processes":
        metadata = {"format": checkpoint.FORMAT, "arrays": checkpoint._described(arrays), "progress": {"step": 1}}
        for process in range(2):
            stored = {name: written(array, process) for name, array in arrays.items()}
            write_arrays(tmp_path / "1.unfinished", process, stored)
        finish(tmp_path / "1.unfinished", 2, metadata | {"checksum": seal(metadata)}, tmp_path / "1")
    else:
        checkpoints.save(arrays, Progress(1))
        checkpoints.wait()
    yield arrays, checkpoints
    checkpoints.close()


def written(array, process):
    """Each process has half of the devices, and writes the regions that it is the first to hold."""
    shards = [shard for shard in array.addressable_shards if shard.replica_id == 0 and shard.device.id // 4 == process]
    regions = [(checkpoint_parts._region(shard.index, array.shape), np.asarray(shard.data)) for shard in shards]
    chunk = checkpoint_store.chunk_of(array.sharding.shard_shape(array.shape), array.dtype.itemsize)
    return StoredArray(array.shape, array.dtype, chunk, regions)


@pytest.mark.parametrize(
    ("shape", "mine", "share"),
    [
        ((1, 8), lambda device: device // 4 == 1, 2),
        ((1, 8), lambda device: device % 2 == 1, 2),
        ((2, 4), lambda device: device // 2 == 1, 2),
        ((2, 4), lambda device: device // 4 == 1, 1),
    ],
)
def test_a_process_reads_the_regions_of_its_devices_alone(saved, monkeypatch, shape, mine, share):
    arrays, checkpoints = saved
    reads, read = [], checkpoint_store._read
    monkeypatch.setattr(checkpoint_store, "_read", lambda *given: reads.append(given[1]) or read(*given))
    like = state(make_mesh(*shape), 1)
    regions = {
        name: checkpoint_parts.held_regions(array.shape, OfProcess(array.sharding, mine))
        for name, array in like.items()
    }
    described = checkpoint._described(arrays)
    found = checkpoint_store.read_arrays(checkpoints.folder / "1", described, regions, lambda _, values: values)
    for name, array in arrays.items():
        for values, region in zip(found[name], regions[name], strict=True):
            np.testing.assert_array_equal(values, np.asarray(array)[checkpoint_store._slices(region)])
        held = sum(values.nbytes for values in found[name])
        assert held == array.nbytes // (1 if SPECS[name] == P() else share)
    assert sorted(reads) == sorted(region for each in regions.values() for region in each)


def test_what_one_process_finds_damaged_all_refuse(saved, monkeypatch):
    arrays, checkpoints = saved
    answers = {"restore": ["", "the array stack is damaged"]}
    monkeypatch.setattr(checkpoint, "told", lambda subject, text: answers[subject])
    with pytest.raises(Unreadable, match="/1 cannot be read: rank 1 finds it damaged"):
        checkpoints.load(1, arrays)


@pytest.mark.parametrize("shape", [(2, 4), (8, 1), (1, 2), (1, 1)], ids=str)
def test_a_checkpoint_goes_on_on_any_mesh(saved, shape):
    arrays, checkpoints = saved
    like = state(make_mesh(*shape), 1)
    found = checkpoints.load(1, like)
    for name, array in found.items():
        assert array.sharding.is_equivalent_to(like[name].sharding, array.ndim)
        np.testing.assert_array_equal(array, arrays[name])


def test_large_arrays_are_stored_in_layers_and_rows(saved, request):
    _, checkpoints = saved
    stored = {name: checkpoint_store._open(checkpoints.folder / "1", name) for name in SPECS}
    chunks = {name: tuple(array.chunk_layout.read_chunk.shape or ()) for name, array in stored.items()}
    assert chunks["stack"] == (1, 64 if "one process" in request.node.name else 16, 24)
    table = chunks["table"][0] * chunks["table"][1] * 2
    assert 1024 <= table <= 8192


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
    assert checkpoint_store.chunk_of(shape, 4) == expected


@pytest.mark.parametrize(
    ("number", "checksums"),
    [
        (1, None),
        (2, {"a": "3e667d78", "b": "10b86c78", "c": "d202ef8d"}),
        (3, {"a": "sum-bb95d391", "b": "sum-71fc1021", "c": "sum-00000000"}),
    ],
)
def test_arrays_of_earlier_formats_are_checked_by_their_metadata(tmp_path, monkeypatch, number, checksums):
    """Format 1 has no checksums, 2 and 3 have one for each array, and none of them one for each chunk."""
    monkeypatch.setattr(checkpoint_store, "_CODECS", checkpoint_store._CODECS[:2])
    arrays = {"a": jnp.arange(12.0).reshape(3, 4), "b": jnp.arange(5, dtype=jnp.bfloat16), "c": jnp.zeros((), bool)}
    arrays["a"] = jax.device_put(arrays["a"], NamedSharding(make_mesh(1, 2), P(None, "fsdp")))

    def write(arrays):
        metadata = {"format": number, "arrays": checkpoint._described(arrays), "progress": {"step": 1}}
        metadata |= {} if checksums is None else {"checksums": checksums}
        stored = {name: checkpoint_parts.whole(np.asarray(array)) for name, array in arrays.items()}
        write_arrays(tmp_path / "1.unfinished", 0, stored)
        finish(tmp_path / "1.unfinished", 1, metadata | {"checksum": seal(metadata)}, tmp_path / "1")
        return Checkpoints(tmp_path)

    for name, array in write(arrays).load(1, arrays).items():
        np.testing.assert_array_equal(array, arrays[name])
    for name in checksums or {}:
        changed = arrays | {name: jnp.ones_like(arrays[name])}
        with pytest.raises(Unreadable, match=f"the array {name} is damaged: expected the checksum {checksums[name]}"):
            write(changed).load(1, arrays)
