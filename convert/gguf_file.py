"""A GGUF file written tensor by tensor under a temporary name, checked, and resumed after a kill.

The unfinished file lies in ``.NAME.converting`` with the checksums of its flushed tensors. The next conversion checks
these and resumes after the last, if sources and settings are the same.
"""

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from convert.errors import ConvertError
from convert.files import atomic_file, flush, read_json
from convert.shard import Counter
from convert.unfinished import Unfinished, misread

PARTIAL = "file.part"
"""Name of the file until it is whole."""

_FLUSH = 2**27  # bytes between flushes, after each of which the written tensors are recorded


class UnfinishedFile:
    """A GGUF file under its temporary name.

    Attributes:
        path: The temporary file.
        checksums: Written tensor -> checksum of its bytes.
        kept: Number of tensors kept from an earlier conversion.
    """

    def __init__(self, state: Unfinished, header: bytes, alignment: int):
        self.path, self.journal = state.home / PARTIAL, state.home / "tensors.json"
        self.header, self.alignment = header, alignment
        self.records: list[list[object]] = []
        self.checksums: dict[str, int] = {}
        self.kept = 0

    def write(self, tensors: Mapping[str, Callable[[], Iterator[np.ndarray]]], counter: Counter) -> None:
        """Write the missing tensors.

        Args:
            tensors: Name -> its bytes as flat uint8 arrays, in the order of the header.
            counter: Counts the tensors' bytes.

        Raises:
            OSError: The disk is full, ….
        """
        found = self._found(list(tensors))
        self.kept = max(0, len(found) - 1)
        with open(self.path, "r+b" if found else "w+b") as stream:
            if not found:
                stream.write(self.header)
                found = [["", 0, len(self.header), zlib.crc32(self.header)]]
            self.records = found
            stream.truncate(found[-1][1] + found[-1][2])
            stream.seek(0, os.SEEK_END)
            self.checksums = {name: checksum for name, _, _, checksum in found[1:]}
            counter.add(sum(size for _, _, size, _ in found[1:]))
            unnoted = 0
            for name, parts in tensors.items():
                if name in self.checksums:
                    continue
                stream.write(bytes(-stream.tell() % self.alignment))
                begin, checksum = stream.tell(), 0
                for raw in parts():
                    stream.write(raw.data)
                    checksum = zlib.crc32(raw.data, checksum)
                    counter.add(raw.size)
                size = stream.tell() - begin
                self.records.append([name, begin, size, checksum])
                self.checksums[name] = checksum
                unnoted += size
                if unnoted >= _FLUSH:
                    stream.flush()
                    os.fdatasync(stream.fileno())
                    self._note()
                    unnoted = 0
            stream.write(bytes(-stream.tell() % self.alignment))
            stream.flush()
            os.fsync(stream.fileno())

    def publish(self, target: Path) -> None:
        """Rename the file to its final name."""
        os.replace(self.path, target)
        flush(target.absolute().parent)

    def _note(self) -> None:
        with atomic_file(self.journal) as stream:
            stream.write(json.dumps({"records": self.records}).encode())

    def _found(self, names: Sequence[str]) -> list[list]:
        """An earlier conversion's records of the header and the first tensors, if the file still matches them."""
        try:
            records = read_json(self.journal)["records"]
            header = ["", 0, len(self.header), zlib.crc32(self.header)]
            same = records[0] == header and [record[0] for record in records[1:]] == names[: len(records) - 1]
            with open(self.path, "rb", buffering=0) as stream:
                whole = same and not misread(stream.fileno(), [tuple(record[1:]) for record in records])
        except (ConvertError, OSError, LookupError, TypeError, ValueError):
            return []
        return records if whole else []
