"""One safetensors file: a checked header, and tensors read one at a time.

The format (https://huggingface.co/docs/safetensors): eight bytes with the header's length, a JSON header
``{name: {dtype, shape, data_offsets}}``, then the tensors' bytes without holes. Order and padding are the safetensors
library's, so that equal tensors give an equal file.
"""

import itertools
import json
import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import ml_dtypes
import numpy as np

from convert.errors import ConvertError, unexpected
from convert.files import parse_json
from convert.limits import DIMENSIONS

# In the order of the library's enumeration: it stores tensors by descending position here, then by name.
DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I16": np.dtype(np.int16),
    "U16": np.dtype(np.uint16),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I32": np.dtype(np.int32),
    "U32": np.dtype(np.uint32),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "I64": np.dtype(np.int64),
    "U64": np.dtype(np.uint64),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_RANK = {dtype: rank for rank, dtype in enumerate(DTYPES.values())}
_MAX_HEADER = 100_000_000  # bytes; the library's own limit
#: Bytes from which a tensor, such as a table of embeddings, is read by several threads, and what each takes at a time:
#: fresh memory keeps a core busy.
_LARGE, _PART, _THREADS = 2**28, 2**26, 4


class TensorInfo(NamedTuple):
    """A tensor's description in the header.

    Attributes:
        shape: Its dimensions.
        dtype: The NumPy (or ml_dtypes) name: "float32", "bfloat16", "uint8"…
        file: The safetensors file.
        start: Offset of its first byte in the file.
    """

    shape: tuple[int, ...]
    dtype: str
    file: Path
    start: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def read_header(file: str | os.PathLike[str]) -> dict[str, TensorInfo]:
    """Read and check a safetensors header; no tensor is read.

    Args:
        file: The file.

    Returns:
        name -> TensorInfo, in the order of the data.

    Raises:
        ConvertError: The file is missing or truncated, or its header contradicts itself or the file's size.
    """
    file = Path(file)
    header, _, length, size = _header(file)
    tensors = {name: _entry(file, name, entry, 8 + length) for name, entry in header.items()}
    tensors = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes)))
    _check_layout(file, tensors, 8 + length, size)
    return tensors


def read_metadata(file: str | os.PathLike[str]) -> dict[str, str]:
    """Read the ``__metadata__`` of a safetensors header.

    Args:
        file: The file.

    Raises:
        ConvertError: As `read_header`.
    """
    return _header(Path(file))[1]


def _header(file: Path) -> tuple[dict[str, Any], dict[str, str], int, int]:
    """The tensors' entries, the metadata, the header's length and the file's size."""
    try:
        with open(file, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            prefix = stream.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(size - 8, _MAX_HEADER):
                expected = "a safetensors header (8 bytes of length, then JSON) inside the file: is the file whole?"
                raise unexpected(file, "header", expected, f"{size} bytes with a header length of {length}")
            raw = stream.read(length)
    except FileNotFoundError:
        raise ConvertError(f"{file}: no such file") from None
    except IsADirectoryError:
        raise unexpected(file, "file", "a safetensors file", "a folder") from None
    header = parse_json(raw, file, "header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise unexpected(file, "__metadata__", "an object of strings", metadata)
    return header, metadata, length, size


def read_tensor(name: str, info: TensorInfo) -> np.ndarray:
    """Read one tensor.

    Args:
        name: Its name, for the message.
        info: From `read_header`.

    Returns:
        A fresh array of ``info.shape`` and ``info.dtype``.

    Raises:
        ConvertError: The file ends before the tensor does.
    """
    return read_range(name, info, 0, math.prod(info.shape)).reshape(info.shape)


def read_range(name: str, info: TensorInfo, first: int, last: int) -> np.ndarray:
    """Read a range of a tensor's elements, in row-major order.

    Args:
        name: Its name, for the message.
        info: From `read_header`.
        first: The first element.
        last: One past the last element.

    Returns:
        A fresh flat array of ``info.dtype``.

    Raises:
        ConvertError: The file ends before the elements do.
    """
    dtype = np.dtype(info.dtype)
    start, size = info.start + first * dtype.itemsize, (last - first) * dtype.itemsize
    raw = np.empty(size, np.uint8)
    part = size if size <= _LARGE else _PART
    places = range(0, size, part or 1)

    def fill(first: int) -> int:
        return _fill(info.file, start + first, raw[first : first + part])

    if len(places) > 1:
        with ThreadPoolExecutor(_THREADS) as pool:
            counts = list(pool.map(fill, places))
    else:
        counts = [fill(first) for first in places]
    for first, count in zip(places, counts, strict=True):
        if count < min(part, size - first):
            raise unexpected(info.file, name, f"{size} bytes at offset {start}", f"{first + count} bytes")
    return raw.view(dtype)


def _fill(file: Path, start: int, raw: np.ndarray) -> int:
    """Fill an array with a file's bytes from an offset on; as many as there were."""
    got = 0
    with open(file, "rb", buffering=0) as stream:
        stream.seek(start)
        while got < raw.size and (count := stream.readinto(raw[got:].data)):  # a call reads at most 2 GiB
            got += count
    return got


def write_tensor_file(
    file: str | os.PathLike[str], tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file, byte for byte as the safetensors library.

    It writes in place: call it inside `convert.files.atomic_folder`.

    Args:
        file: The file.
        tensors: name -> array (any memory order).
        metadata: The header's ``__metadata__``; None: ``{"format": "pt"}``, as transformers requires.

    Raises:
        ConvertError: An array's dtype has no name in the format.
        OSError: The write fails.
    """
    arrays = {name: np.asarray(array) for name, array in tensors.items()}
    layout = lay_out(file, {name: (array.dtype, array.shape) for name, array in arrays.items()}, metadata)
    with open(file, "wb") as stream:
        stream.write(layout.header)
        for name in layout.tensors:
            stream.write(np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8).data)


class Layout(NamedTuple):
    """The layout of a file to be written.

    Attributes:
        header: The header's bytes, including the length in front.
        tensors: name -> place of its bytes, in the order of the file.
        size: Bytes of the whole file.
    """

    header: bytes
    tensors: dict[str, TensorInfo]
    size: int


def lay_out(
    file: str | os.PathLike[str],
    described: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
    metadata: Mapping[str, str] | None = None,
) -> Layout:
    """Lay out tensors by their descriptions; their values may still be unknown.

    Args:
        file: The file to be written.
        described: name -> (dtype, shape).
        metadata: As for `write_tensor_file`.

    Returns:
        The layout that the safetensors library would choose.

    Raises:
        ConvertError: A dtype has no name in the format.
    """
    for name, (dtype, _) in described.items():
        if dtype not in _NAMES:
            raise unexpected(file, name, f"a dtype of {', '.join(map(str, _RANK))}", str(dtype))
    ordered = sorted(described.items(), key=lambda item: (-_RANK[item[1][0]], item[0]))
    header: dict[str, Any] = {"__metadata__": dict({"format": "pt"} if metadata is None else metadata)}
    sizes = [math.prod(shape) * dtype.itemsize for _, (dtype, shape) in ordered]
    ends = list(itertools.accumulate(sizes))
    for (name, (dtype, shape)), size, end in zip(ordered, sizes, ends, strict=True):
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [end - size, end]}
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    raw += b" " * (-len(raw) % 8)
    start = 8 + len(raw)
    places = {
        name: TensorInfo(shape, dtype.name, Path(file), start + end - size)
        for (name, (dtype, shape)), size, end in zip(ordered, sizes, ends, strict=True)
    }
    return Layout(len(raw).to_bytes(8, "little") + raw, places, start + (ends[-1] if ends else 0))


def _entry(file: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    if not isinstance(entry, dict):
        raise unexpected(file, name, "an object with dtype, shape and data_offsets", entry)
    dtype = entry.get("dtype")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise unexpected(file, f"{name}.dtype", f"one of {', '.join(DTYPES)}", dtype)
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not _naturals(shape) or len(shape) > DIMENSIONS:
        raise unexpected(file, f"{name}.shape", f"a list of sizes (at most {DIMENSIONS})", shape)
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise unexpected(file, f"{name}.data_offsets", "[begin, end]", offsets)
    info = TensorInfo(tuple(shape), DTYPES[dtype].name, file, data_start + offsets[0])
    if offsets[1] - offsets[0] != info.nbytes:
        raise unexpected(file, f"{name}.data_offsets", f"{info.nbytes} bytes for {dtype} {shape}", offsets)
    return info


def _naturals(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _check_layout(file: Path, tensors: Mapping[str, TensorInfo], data_start: int, size: int) -> None:
    """Check that the tensors, in order, cover the data without holes or overlaps, to the file's last byte."""
    position = data_start
    for name, info in tensors.items():
        if info.start != position:
            given = f"offset {info.start}"
            raise unexpected(file, f"{name}.data_offsets", f"offset {position}, where the tensor before it ends", given)
        position += info.nbytes
    if position != size:
        raise unexpected(file, "size", f"{position} bytes from the header: is the file whole?", f"{size} bytes")
