"""The header of a GGUF file: metadata and tensors' places; every count is checked against the file's size.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), little-endian, versions 2 and 3: magic, version,
counts, key-value pairs, tensor descriptions, padding, data.
"""

import math
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from convert.errors import ConvertError, unexpected

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
#: Type number -> name, elements per block, bytes per block; the written types and the K-quants.
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
_MOST = 2**27  # bytes of the largest header


class GGUFTensor(NamedTuple):
    """A tensor's description.

    Attributes:
        shape: As in NumPy, the rows first.
        type: "F16", "Q8_0", …
        start: Offset of its first byte in the file.
        nbytes: Its size.
    """

    shape: tuple[int, ...]
    type: str
    start: int
    nbytes: int


class GGUFHeader(NamedTuple):
    """A file's metadata and tensors.

    Attributes:
        metadata: Key -> value; arrays are lists.
        tensors: Name -> description, in the order of the file.
    """

    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_gguf_header(file: str | os.PathLike[str]) -> GGUFHeader:
    """Read and check a header, no tensor.

    Args:
        file: The file.

    Returns:
        Metadata and tensors.

    Raises:
        ConvertError: The file is missing, not GGUF, truncated or inconsistent.
    """
    file = Path(file)
    try:
        with open(file, "rb") as stream:
            return _Reader(file, stream).header()
    except FileNotFoundError:
        raise ConvertError(f"{file}: no such file") from None
    except IsADirectoryError:
        raise unexpected(file, "file", "a GGUF file", "a folder") from None


class _Reader:
    def __init__(self, file: Path, stream: BinaryIO):
        self.file, self.stream = file, stream
        self.size = os.fstat(stream.fileno()).st_size

    def header(self) -> GGUFHeader:
        if self.stream.read(4) != b"GGUF":
            raise unexpected(self.file, "magic", "'GGUF'", "another")
        version = self.number("I", "version")
        if version not in (2, 3):
            raise unexpected(self.file, "version", "2 or 3, little-endian", version)
        tensors = self.count("tensor count", 4 + 8 + 4 + 8)
        pairs = self.count("metadata count", 8 + 4 + 1)
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = self.text("metadata key")
            if key in metadata:
                raise ConvertError(f"{self.file}: metadata: the key {key[:100]!r} twice")
            metadata[key] = self.value(self.number("I", key), key, 0)
        described = [self.description() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment < 2**31 or alignment & (alignment - 1):
            raise unexpected(self.file, "general.alignment", "a power of two", alignment)
        start = -(-self.stream.tell() // alignment) * alignment
        found: dict[str, GGUFTensor] = {}
        for name, shape, kind, offset in described:
            text, elements, size = TYPES[kind]
            if shape[-1] % elements:
                raise unexpected(self.file, name, f"rows of a multiple of {elements} elements for {text}", shape)
            nbytes = math.prod(shape) // elements * size
            if offset % alignment or start + offset + nbytes > self.size:
                given = f"{nbytes} bytes at {offset} in a file of {self.size}"
                raise unexpected(self.file, name, "data inside the file, aligned: is the file whole?", given)
            if name in found:
                raise ConvertError(f"{self.file}: the tensor {name[:100]!r} twice")
            found[name] = GGUFTensor(shape, text, start + offset, nbytes)
        return GGUFHeader(metadata, found)

    def description(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.text("tensor name")
        dimensions = self.number("I", name)
        if not 1 <= dimensions <= 4:
            raise unexpected(self.file, name, "1 to 4 dimensions", dimensions)
        shape = tuple(self.number("Q", name) for _ in range(dimensions))[::-1]
        if math.prod(shape) >= 2**50:
            raise unexpected(self.file, name, "a shape that fits the file", shape)
        kind = self.number("I", name)
        if kind not in TYPES:
            raise unexpected(self.file, f"{name}: type", f"one of {', '.join(t[0] for t in TYPES.values())}", kind)
        return name, shape, kind, self.number("Q", name)

    def value(self, kind: int, key: str, depth: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], key)
        if kind == _STRING:
            return self.text(key)
        if kind != _ARRAY or depth > 2:
            raise unexpected(self.file, key, "a type of the format", kind)
        inner = self.number("I", key)
        size = struct.calcsize(_SCALARS[inner]) if inner in _SCALARS else 8
        count = self.count(key, size)
        if inner in _SCALARS:
            return list(struct.unpack(f"<{count}{_SCALARS[inner]}", self.take(count * size, key)))
        return [self.value(inner, key, depth + 1) for _ in range(count)]

    def count(self, what: str, least: int) -> int:
        """Read a count of items, which take `least` bytes each and must fit into the rest of the file."""
        number = self.number("Q", what)
        if number * least > min(self.size - self.stream.tell(), _MOST):
            raise unexpected(self.file, what[:100], "a number that fits the file: is it whole?", number)
        return number

    def text(self, what: str) -> str:
        raw = self.take(self.count(what, 1), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise unexpected(self.file, what[:100], "UTF-8", raw[:40]) from None

    def number(self, code: str, what: str) -> Any:
        size = struct.calcsize(code)
        return struct.unpack(f"<{code}", self.take(size, what))[0]

    def take(self, size: int, what: str) -> bytes:
        raw = self.stream.read(size)
        if len(raw) != size:
            raise unexpected(self.file, what[:100], f"{size} bytes: is the file whole?", f"{len(raw)} bytes")
        return raw
