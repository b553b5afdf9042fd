"""A checkpoint on disk: read by TensorStore, and verified by checksums.

Each array is stored in zarr's format in a database of TensorStore (OCDBT), which compresses without a checksum: a
flipped bit comes back as another value. Each is read on its own; the CRC-32 in the checkpoint's metadata (3 GB/s a
core; no burst of up to 32 bits escapes it, anything else with a chance of 2⁻³²) finds the damaged one. The metadata
carry their own checksum and are not trusted without it.

An array that several processes hold in parts has no bytes in one place: its checksum is a sum over its elements
(`checkpoint_sums`).

A process reads of an array the regions that its devices need. A sum over the elements is one of the regions' sums, so
nothing else is read; a CRC is of all bytes in their order, so they are read, a block behind the other, and the regions
are kept.

Nothing here imports JAX.
"""

import contextlib
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fastjax.errors import TrainingError
from fastjax.training.checkpoint_sums import SUM, Region, array_bytes, region_sum, sum_checksum, whole_region

#: File of the metadata: the name is Orbax's, which wrote earlier versions' checkpoints in the same format.
METADATA = "_CHECKPOINT_METADATA"
#: Format of metadata from before the checksums.
UNCHECKED_FORMAT = 1
#: Arrays read at the same time: decompression takes a core each.
_READERS = 4

#: Bytes of an array that are read at once, but of whole chunks.
BLOCK_BYTES = 2**26

Placed = TypeVar("Placed")


class Unreadable(TrainingError):
    """A checkpoint that is damaged: the message names its folder, and the file or the array."""

    def __init__(self, folder: Path, what: str):
        super().__init__(f"{folder} cannot be read: {what}")


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
        found = json.loads((folder / METADATA).read_bytes())["custom_metadata"]
        expected, unchecked = found.get("checksum"), found.get("format") == UNCHECKED_FORMAT
    except FileNotFoundError as error:
        raise Unreadable(folder, f"{METADATA} is missing") from error
    except OSError as error:
        raise Unreadable(folder, f"{METADATA}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise Unreadable(folder, f"{METADATA} is damaged: {type(error).__name__}: {str(error)[:200]}") from error
    if not (unchecked and expected is None) and expected != (given := seal(found)):
        raise Unreadable(folder, f"{METADATA} is damaged: expected the checksum {expected}, got {given}")
    return found


def read_arrays(
    folder: Path,
    described: Mapping[str, Sequence[Any]],
    checksums: Mapping[str, str] | None,
    regions: Mapping[str, Sequence[Region]],
    place: Callable[[str, list[np.ndarray]], Placed],
) -> tuple[dict[str, Placed], dict[str, list[int]]]:
    """Read parts of a checkpoint's arrays.

    Args:
        folder: of the checkpoint.
        described: name → shape and dtype of the wanted arrays; none of them empty.
        checksums: name → checksum; None: the checkpoint has none.
        regions: name → the wanted parts, which do not overlap.
        place: puts an array's parts in their places as soon as they are read; the host holds those of a few arrays.

    Returns:
        name → what `place` has made of the array; and of arrays whose checksum is a sum, name → the sums of the parts,
        which are for the caller to check (`check_sum`).

    Raises:
        Unreadable: an array that cannot be read, has another shape or dtype, or does not match its CRC.
    """

    def read(name: str) -> tuple[Placed, list[int] | None]:
        shape, dtype = described[name]
        with _found(folder, name):
            stored = _open(folder, name)
        if [list(stored.shape), str(stored.dtype.numpy_dtype)] != [list(shape), dtype]:
            given = f"{stored.dtype.numpy_dtype}{list(stored.shape)}"
            raise Unreadable(folder, f"the array {name} is damaged: expected {dtype}{list(shape)}, got {given}")
        expected = None if checksums is None else checksums.get(name)
        with _found(folder, name):
            if checksums is None or (expected is not None and expected.startswith(SUM)):
                parts, sums = _read_parts(stored, regions[name], summed=checksums is not None)
            else:
                parts, found = _read_through(stored, regions[name])
                sums = None
        if checksums is not None and sums is None and found != expected:
            raise _mismatch(folder, name, expected, found)
        return place(name, parts), sums

    with ThreadPoolExecutor(_READERS, thread_name_prefix="restore") as pool:
        made = dict(zip(described, pool.map(read, described), strict=True))
    return (
        {name: placed for name, (placed, _) in made.items()},
        {name: sums for name, (_, sums) in made.items() if sums is not None},
    )


def check_sum(folder: Path, name: str, checksums: Mapping[str, str], total: int) -> None:
    """Check the sum of an array's parts.

    Args:
        folder: of the checkpoint.
        name: of the array.
        checksums: name → checksum.
        total: the sum of the sums of all parts.

    Raises:
        Unreadable: it is not the array's.
    """
    if (given := sum_checksum(total)) != checksums.get(name):
        raise _mismatch(folder, name, checksums.get(name), given)


def _mismatch(folder: Path, name: str, expected: str | None, given: str) -> Unreadable:
    return Unreadable(folder, f"the array {name} is damaged: expected the checksum {expected}, got {given}")


@contextlib.contextmanager
def _found(folder: Path, name: str) -> Iterator[None]:
    """Turns TensorStore's errors, of many kinds for damaged files, into one."""
    try:
        yield
    except Exception as error:
        text = " ".join(str(error).split("[tensorstore_spec")[0].split())
        raise Unreadable(folder, f"the array {name} is damaged: {text[:300]}") from error


def _open(folder: Path, name: str) -> Any:
    import tensorstore

    files = {"driver": "file", "path": f"{folder / 'state'}/"}
    database = {"driver": "ocdbt", "base": files, "path": f"{name}/"}
    return tensorstore.open({"driver": "zarr3", "kvstore": database}, open=True, read=True).result()


def _read(stored: Any, region: Region) -> np.ndarray:
    return np.asarray(stored[tuple(slice(*axis) for axis in region)].read().result())


def _blocks(stored: Any, region: Region) -> Iterator[Region]:
    """Parts of a region along its first axis, of whole chunks, which TensorStore would decode for each part again."""
    if not region:
        yield region
        return
    (first, last), *rest = region
    rows = stored.chunk_layout.read_chunk.shape[0]
    row_bytes = math.prod(behind - before for before, behind in rest) * stored.dtype.numpy_dtype.itemsize
    chunks = max(1, BLOCK_BYTES // (rows * row_bytes))
    while first < last:
        behind = min(last, (first // rows + chunks) * rows)
        yield ((first, behind), *rest)
        first = behind


def _read_parts(stored: Any, regions: Sequence[Region], *, summed: bool) -> tuple[list[np.ndarray], list[int] | None]:
    """The parts, and their sums."""
    parts, sums = [], []
    for region in regions:
        part = np.empty([last - first for first, last in region], stored.dtype.numpy_dtype)
        total = 0
        for block in _blocks(stored, region):
            values = _read(stored, block)
            total += region_sum(values, block, stored.shape) if summed else 0
            if block == region:
                part = values
            else:
                part[block[0][0] - region[0][0] : block[0][1] - region[0][0]] = values
        parts.append(part)
        sums.append(total)
    return parts, sums if summed else None


def _read_through(stored: Any, regions: Sequence[Region]) -> tuple[list[np.ndarray], str]:
    """The parts, and the CRC of the whole array."""
    parts = [np.empty([last - first for first, last in region], stored.dtype.numpy_dtype) for region in regions]
    everything, crc = whole_region(stored.shape), 0
    for block in _blocks(stored, everything):
        values = _read(stored, block)
        crc = zlib.crc32(array_bytes(values), crc)
        if block == everything and list(regions) == [everything]:
            return [values], f"{crc:08x}"
        for part, region in zip(parts, regions, strict=True):
            _keep(values, block, part, region)
    return parts, f"{crc:08x}"


def _keep(values: np.ndarray, block: Region, part: np.ndarray, region: Region) -> None:
    """Copy what of a block is in a region to its part."""
    if not region:
        part[...] = values
        return
    (start, end), (first, last) = block[0], region[0]
    before, behind = max(start, first), min(end, last)
    if before < behind:
        rest = tuple(slice(*axis) for axis in region[1:])
        part[before - first : behind - first] = values[(slice(before - start, behind - start), *rest)]
