"""The files of a checkpoint, written by TensorStore: each process its parts, and one process what makes them a whole.

A part is a database of its own, whose files the whole one names; so nothing is written twice. All that a process has
begun to write has ended when it knows whether it went well: nothing is left at work that could make a removed folder
again. The folder has a temporary name until it is whole.

Nothing here imports JAX.
"""

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from convert.files import flush
from fastjax.training.checkpoint_files import BLOCK_BYTES, METADATA
from fastjax.training.checkpoint_sums import Region

#: Endings of folders that are not whole yet, are not wanted any more, and of those that earlier versions left.
UNFINISHED, GONE, _OLD = ".unfinished", ".deleted", ".orbax-checkpoint-tmp"
#: Bytes of the smallest chunks that an array is cut into.
LEAST_CHUNK = 2**20
_CODECS = [{"name": "bytes"}, {"name": "zstd", "configuration": {"level": 3}}]


class Stored(NamedTuple):
    """A process's parts of an array.

    Attributes:
        shape: of the array.
        dtype: of the array.
        chunk: shape of the pieces in which it is stored; each region is a number of these.
        parts: the regions that this process writes, and their values.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: tuple[int, ...]
    parts: Sequence[tuple[Region, np.ndarray]]


def chunk_of(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """The chunks in which a part of an array is stored: itself, a layer each, or rows of a table.

    Args:
        shape: of the part.
        itemsize: bytes of an element.
    """
    row = math.prod(shape[1:]) * itemsize
    if not shape or shape[0] * row <= BLOCK_BYTES:
        return tuple(shape)
    most = 1 if len(shape) > 2 else max(1, BLOCK_BYTES // row)
    rows = next(count for count in range(most, 0, -1) if shape[0] % count == 0)
    return (rows, *shape[1:]) if rows * row >= LEAST_CHUNK else tuple(shape)


def write_parts(folder: Path, process: int, arrays: Mapping[str, Stored]) -> None:
    """Write this process's parts of arrays; returns when all writes have ended.

    Args:
        folder: of the unfinished checkpoint; made if need be.
        process: this one; the first describes the arrays.
        arrays: by name; none of them empty.

    Raises:
        OSError: the folder cannot be made.
        ValueError: TensorStore's, of a write that failed.
    """
    import tensorstore

    own = folder / "state" / _part(process)
    own.mkdir(parents=True, exist_ok=True)
    context, writes = tensorstore.Context(), []
    spec: dict[str, Any] = {"driver": "zarr3", "metadata": {"codecs": _CODECS}, "store_data_equal_to_fill_value": True}
    spec |= {"create": True} if process == 0 else {"open": True, "assume_metadata": True}
    for name, array in arrays.items():
        layout = tensorstore.ChunkLayout(chunk_shape=array.chunk)
        kvstore = {**_database(own), "path": f"{name}/"}
        opened = tensorstore.open(
            {**spec, "kvstore": kvstore},
            shape=array.shape,
            dtype=array.dtype,
            chunk_layout=layout,
            context=context,
        )
        writes.append((opened, array.parts))
    futures, failed = [], None
    for opened, parts in writes:
        try:
            store = opened.result()
        except ValueError as error:
            failed = failed or error
            continue
        for region, values in parts:  # which nobody changes: they are not copied again
            place = store[tuple(slice(*axis) for axis in region)]
            futures.append(place.write(values, can_reference_source_data_indefinitely=True))
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
        part = tensorstore.KvStore.open(_database(state / _part(process)), context=context).result()
        part.experimental_copy_range_to(whole.with_transaction(transaction)).result()
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


def _part(process: int) -> str:
    return f"ocdbt.process_{process}"


def _database(folder: Path) -> dict[str, Any]:
    return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}}
