"""A checkpoint on disk, written and read by TensorStore; damage to any of its files is found when it is read.

The arrays are stored in zarr's format in a database of TensorStore (OCDBT). Each chunk ends with a CRC-32C of its
compressed bytes, the database has checksums of its own nodes, and a chunk that is missing is an error; so each process
reads the regions that its devices need and nothing else. The JSON beside the arrays carries its own checksum and is not
trusted without it.

Each process writes its part of the arrays as a database of its own, whose files the whole one names; so nothing is
written twice. All that a process has begun to write has ended when it knows whether it went well: nothing is left at
work that could make a removed folder again. The folder has a temporary name until it is whole.

Nothing here imports JAX.
"""

import contextlib
import json
import math
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from convert.files import flush
from fastjax.errors import TrainingError

#: File of the metadata: the name is Orbax's, which wrote earlier versions' checkpoints in the same format.
METADATA = "_CHECKPOINT_METADATA"
#: Format of metadata from before the checksums.
UNCHECKED_FORMAT = 1
#: Endings of folders that are not whole yet, are not wanted any more, and of those that earlier versions left.
UNFINISHED, GONE, _OLD = ".unfinished", ".deleted", ".orbax-checkpoint-tmp"
#: Bytes of the largest and of the smallest chunks that an array is cut into.
MOST_CHUNK, LEAST_CHUNK = 2**26, 2**20
#: Arrays read at the same time: decompression takes a core each.
_READERS = 4
_CODECS = [{"name": "bytes"}, {"name": "zstd", "configuration": {"level": 3}}, {"name": "crc32c"}]

#: A region of an array: along each axis its first index, and the one behind the last.
Region = tuple[tuple[int, int], ...]
Placed = TypeVar("Placed")


class Unreadable(TrainingError):
    """A checkpoint that is damaged: the message names its folder, and the file or the array."""

    def __init__(self, folder: Path, what: str):
        super().__init__(f"{folder} cannot be read: {what}")


class StoredArray(NamedTuple):
    """The regions of an array that a process writes.

    Attributes:
        shape: of the array.
        dtype: of the array.
        chunk: shape of the chunks in which it is stored; each region is a number of these.
        regions: with their values.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: tuple[int, ...]
    regions: Sequence[tuple[Region, np.ndarray]]


def seal(metadata: Mapping[str, Any]) -> str:
    """The field `checksum` of metadata: the CRC-32 of their other fields as sorted JSON.

    Args:
        metadata: with or without a checksum.
    """
    plain = json.loads(json.dumps({name: value for name, value in metadata.items() if name != "checksum"}))
    return f"{zlib.crc32(json.dumps(plain, sort_keys=True).encode()):08x}"


def read_metadata(folder: Path) -> dict[str, Any]:
    """Read the metadata of a checkpoint.

    Args:
        folder: of the checkpoint.

    Returns:
        The JSON of `Checkpoints`, of any version.

    Raises:
        Unreadable: they are missing, or do not match their checksum. Those of format 1 have none.
    """
    try:
        metadata = json.loads((folder / METADATA).read_bytes())["custom_metadata"]
        expected, unchecked = metadata.get("checksum"), metadata.get("format") == UNCHECKED_FORMAT
    except FileNotFoundError as error:
        raise Unreadable(folder, f"{METADATA} is missing") from error
    except OSError as error:
        raise Unreadable(folder, f"{METADATA}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise Unreadable(folder, f"{METADATA} is damaged: {type(error).__name__}: {str(error)[:200]}") from error
    if not (unchecked and expected is None) and expected != (given := seal(metadata)):
        raise Unreadable(folder, f"{METADATA} is damaged: expected the checksum {expected}, got {given}")
    return metadata


def read_arrays(
    folder: Path,
    described: Mapping[str, Sequence[Any]],
    regions: Mapping[str, Sequence[Region]],
    place: Callable[[str, list[np.ndarray]], Placed],
    check: Callable[[str, np.ndarray], str | None] | None = None,
) -> dict[str, Placed]:
    """Read regions of a checkpoint's arrays.

    Args:
        folder: of the checkpoint.
        described: name → shape and dtype of the wanted arrays; none of them empty.
        regions: name → the wanted ones, which do not overlap.
        place: puts an array's regions in their places as soon as they are read; the host holds those of a few arrays.
        check: of a checkpoint whose chunks have no checksums: says what is wrong with a whole array, or None.

    Returns:
        name → what `place` has made of the array.

    Raises:
        Unreadable: an array that cannot be read, or has another shape or dtype.
    """

    def read(name: str) -> Placed:
        shape, dtype = described[name]
        with _named(folder, name):
            stored = _open(folder, name, sparse=check is not None)
            if [list(stored.shape), str(stored.dtype.numpy_dtype)] != [list(shape), dtype]:
                raise ValueError(f"expected {dtype}{list(shape)}, got {stored.dtype.numpy_dtype}{list(stored.shape)}")
            if check is None:
                values = [_read(stored, region) for region in regions[name]]
            else:
                whole = _read(stored, whole_region(shape))
                if (problem := check(name, whole)) is not None:
                    raise ValueError(problem)
                values = [whole[_slices(region)] for region in regions[name]]
        return place(name, values)

    with ThreadPoolExecutor(_READERS, thread_name_prefix="restore") as pool:
        return dict(zip(described, pool.map(read, described), strict=True))


@contextlib.contextmanager
def _named(folder: Path, name: str) -> Iterator[None]:
    """Turns TensorStore's errors, of many kinds for damaged files, into one that names the array."""
    try:
        yield
    except Exception as error:
        text = " ".join(str(error).split("[tensorstore_spec")[0].split())
        raise Unreadable(folder, f"the array {name} is damaged: {text[:300]}") from error


def _open(folder: Path, name: str, *, sparse: bool = False) -> Any:
    """The stored array; `sparse`: chunks that are missing are the fill value's."""
    import tensorstore

    kvstore = {**_database(folder / "state"), "path": f"{name}/"}
    spec = {"driver": "zarr3", "kvstore": kvstore, "fill_missing_data_reads": sparse}
    return tensorstore.open(spec, open=True, read=True).result()


def _read(stored: Any, region: Region) -> np.ndarray:
    return np.asarray(stored[_slices(region)].read().result())


def _slices(region: Region) -> tuple[slice, ...]:
    return tuple(slice(*axis) for axis in region)


def whole_region(shape: Sequence[int]) -> Region:
    """The region of all of an array.

    Args:
        shape: of the array.
    """
    return tuple((0, size) for size in shape)


def chunk_of(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """The chunks in which a region is stored: itself, a layer each, or rows of a table.

    Args:
        shape: of the region.
        itemsize: bytes of an element.
    """
    row = math.prod(shape[1:]) * itemsize
    if not shape or shape[0] * row <= MOST_CHUNK:
        return tuple(shape)
    most = 1 if len(shape) > 2 else max(1, MOST_CHUNK // row)
    rows = next(count for count in range(most, 0, -1) if shape[0] % count == 0)
    return (rows, *shape[1:]) if rows * row >= LEAST_CHUNK else tuple(shape)


def write_arrays(folder: Path, process: int, arrays: Mapping[str, StoredArray]) -> None:
    """Write this process's regions of arrays; returns when all writes have ended.

    Args:
        folder: of the unfinished checkpoint; made if need be.
        process: this one; the first describes the arrays.
        arrays: by name; none of them empty.

    Raises:
        OSError: the folder cannot be made.
        ValueError: TensorStore's, of a write that failed.
    """
    import tensorstore

    database = folder / "state" / _process(process)
    database.mkdir(parents=True, exist_ok=True)
    context, writes = tensorstore.Context(), []
    spec: dict[str, Any] = {"driver": "zarr3", "metadata": {"codecs": _CODECS}, "store_data_equal_to_fill_value": True}
    spec |= {"create": True} if process == 0 else {"open": True, "assume_metadata": True}
    for name, array in arrays.items():
        layout = tensorstore.ChunkLayout(chunk_shape=array.chunk)
        kvstore = {**_database(database), "path": f"{name}/"}
        opened = tensorstore.open(
            {**spec, "kvstore": kvstore},
            shape=array.shape,
            dtype=array.dtype,
            chunk_layout=layout,
            context=context,
        )
        writes.append((opened, array.regions))
    futures, failed = [], None
    for opened, regions in writes:
        try:
            store = opened.result()
        except ValueError as error:
            failed = failed or error
            continue
        for region, values in regions:  # which nobody changes: they are not copied again
            futures.append(store[_slices(region)].write(values, can_reference_source_data_indefinitely=True))
    for future in futures:
        try:
            future.result()
        except ValueError as error:
            failed = failed or error
    if failed is not None:
        raise failed


def finish(folder: Path, processes: int, metadata: Mapping[str, Any], target: Path) -> None:
    """Make a checkpoint of what all processes have written, and give it its name.

    Args:
        folder: of the unfinished checkpoint.
        processes: their number.
        metadata: JSON beside the arrays.
        target: its folder from now on, in place of what is there.

    Raises:
        OSError: a write failed.
        ValueError: one of TensorStore's failed.
    """
    import tensorstore

    state, context = folder / "state", tensorstore.Context()
    whole = tensorstore.KvStore.open(_database(state), context=context).result()
    transaction = tensorstore.Transaction(atomic=True)
    for process in range(processes):
        store = tensorstore.KvStore.open(_database(state / _process(process)), context=context).result()
        store.experimental_copy_range_to(whole.with_transaction(transaction)).result()
    transaction.commit_async().result()
    handlers = {"state": "orbax.checkpoint.experimental.v1._src.handlers.pytree_handler.PyTreeHandler"}
    names = [name for name, (shape, _) in metadata["arrays"].items() if math.prod(shape)]
    files = {
        folder / METADATA: json.dumps({"item_handlers": handlers, "custom_metadata": metadata}),
        state / "_METADATA": json.dumps(_tree(names)),
        folder / "orbax.checkpoint": "",
    }
    for file, text in files.items():
        file.write_text(text, encoding="utf-8")
    for path in (*files, state, folder):
        flush(path)
    if target.exists():
        retire(target)
    folder.rename(target)
    flush(target.parent)


def _tree(names: Sequence[str]) -> dict[str, Any]:
    """Description of a flat dict of arrays for Orbax, which reads such checkpoints."""
    value = {"value_type": "np.ndarray", "skip_deserialize": False}
    arrays = {str((name,)): {"key_metadata": [{"key": name, "key_type": 2}], "value_metadata": value} for name in names}
    return {"tree_metadata": arrays, "use_ocdbt": True, "use_zarr3": True, "store_array_data_equal_to_fill_value": True}


def retire(checkpoint: Path) -> None:
    """Delete a checkpoint; it loses its name first.

    Args:
        checkpoint: its folder.
    """
    shutil.rmtree(checkpoint.rename(checkpoint.with_name(f"{checkpoint.name}{GONE}")), ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove what unfinished saves and deletions have left.

    Args:
        folder: of the checkpoints.
    """
    for ending in (UNFINISHED, GONE, f"{_OLD}*"):
        for left in folder.glob(f"*{ending}"):
            shutil.rmtree(left, ignore_errors=True)


def _process(process: int) -> str:
    return f"ocdbt.process_{process}"


def _database(folder: Path) -> dict[str, Any]:
    return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}}
