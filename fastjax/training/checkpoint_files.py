"""A checkpoint on disk: written by Orbax, read by TensorStore, verified by checksums.

Orbax stores each array in zarr's format in a database of TensorStore (OCDBT), which compresses without a checksum: a
flipped bit comes back as another value. It reads all arrays at once, and if one is damaged, the reads of the others end
in tracebacks. Here TensorStore reads each array on its own; the CRC-32 in the checkpoint's metadata (3 GB/s a core; no
burst of up to 32 bits escapes it, anything else with a chance of 2⁻³²) finds the damaged one. The metadata carry their
own checksum and are not trusted without it.

An array that several processes hold in parts has no bytes in one place: its checksum is a sum over its elements, each
mixed with its place (`element_sum`), which the devices compute where the parts are. A change to one element is always
found, any other with a chance of 1 - 2⁻³².

Nothing here imports JAX.
"""

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fastjax.errors import TrainingError

#: Orbax's file of the metadata.
METADATA = "_CHECKPOINT_METADATA"
#: Format of metadata from before the checksums.
UNCHECKED_FORMAT = 1
#: Arrays read at the same time: decompression takes a core each.
_READERS = 4
#: Beginning of the checksum of an array that was written in parts.
_SUM = "sum-"

Placed = TypeVar("Placed")


class Unreadable(TrainingError):
    """A checkpoint that is damaged: the message names its folder, and the file or the array."""

    def __init__(self, folder: Path, what: str):
        super().__init__(f"{folder} cannot be read: {what}")


def checksum(array: np.ndarray) -> str:
    """The CRC-32 of an array's bytes, as eight hexadecimal digits.

    Args:
        array: of any shape and dtype.
    """
    plain: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)  # dtypes of ml_dtypes are no buffers
    return f"{zlib.crc32(plain):08x}"


def element_sum(bits: Any, xp: Any) -> Any:
    """The sum, modulo 2³², of an array's elements, each mixed with its place by a bijection (MurmurHash3's finaliser).

    Args:
        bits: the elements as unsigned integers of up to 32 bits.
        xp: numpy, or jax.numpy.

    Returns:
        uint32 [].
    """
    place = xp.arange(bits.size, dtype=xp.uint32).reshape(bits.shape)
    mixed = bits.astype(xp.uint32) ^ (place * xp.uint32(0x9E3779B1))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        mixed = (mixed ^ (mixed >> xp.uint32(shift))) * xp.uint32(factor)
    return xp.sum(mixed, dtype=xp.uint32)


def sum_checksum(value: Any) -> str:
    """The checksum of an array that was written in parts.

    Args:
        value: its `element_sum`.
    """
    return f"{_SUM}{int(value):08x}"


def _found_checksum(array: np.ndarray, expected: str | None) -> str:
    """The checksum of an array that was read, of the kind of the expected one."""
    if expected is None or not expected.startswith(_SUM):
        return checksum(array)
    kind = {1: np.uint8, 2: np.uint16, 4: np.uint32}[array.dtype.itemsize]
    plain: Any = np.ascontiguousarray(array).reshape(-1).view(kind)
    return sum_checksum(element_sum(plain, np))


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
    place: Callable[[str, np.ndarray], Placed],
) -> dict[str, Placed]:
    """Read arrays of a checkpoint.

    Args:
        folder: of the checkpoint.
        described: name → shape and dtype of the wanted arrays; none of them empty.
        checksums: name → checksum; None: the checkpoint has none.
        place: puts an array in its place as soon as it is read; the host holds a few at a time.

    Returns:
        name → what `place` has made of the array.

    Raises:
        Unreadable: an array that cannot be read, has another shape or dtype, or does not match its checksum.
    """

    def read(name: str) -> Placed:
        shape, dtype = described[name]
        array = _read(folder, name)
        if [list(array.shape), str(array.dtype)] != [list(shape), dtype]:
            given = f"{array.dtype}{list(array.shape)}"
            raise Unreadable(folder, f"the array {name} is damaged: expected {dtype}{list(shape)}, got {given}")
        expected = None if checksums is None else checksums.get(name)
        if checksums is not None and (given := _found_checksum(array, expected)) != expected:
            raise Unreadable(folder, f"the array {name} is damaged: expected the checksum {expected}, got {given}")
        return place(name, array)

    with ThreadPoolExecutor(_READERS, thread_name_prefix="restore") as pool:
        return dict(zip(described, pool.map(read, described), strict=True))


def _read(folder: Path, name: str) -> np.ndarray:
    import tensorstore

    files = {"driver": "file", "path": f"{folder / 'state'}/"}
    database = {"driver": "ocdbt", "base": files, "path": f"{name}/"}
    try:
        stored = tensorstore.open({"driver": "zarr3", "kvstore": database}, open=True, read=True).result()
        return np.asarray(stored.read().result())
    except Exception as error:  # TensorStore raises many kinds for damaged files
        text = " ".join(str(error).split("[tensorstore_spec")[0].split())
        raise Unreadable(folder, f"the array {name} is damaged: {text[:300]}") from error
