"""A folder or file that is not whole yet: where it lies, what it is made from, and what of it is finished.

Beside the final place, in ``.NAME.converting``: the folder itself, ``made_from.json``, a JSON file with checksums for
each file that is finished, a lock, and while an earlier folder is being replaced that one.
"""

import contextlib
import fcntl
import json
import mmap
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from convert.checkpoint import CONFIG
from convert.errors import ConvertError, unexpected
from convert.files import atomic_file, flush, read_json
from convert.tensor_file import Layout

_PART = 2**23  # bytes read at a time when a file is checked


class Unfinished:
    """The unfinished folder, and beside it what is known of it: ``made_from.json``, and one JSON file a shard."""

    def __init__(self, target: Path):
        self.target = target
        self.home = target.absolute().parent / f".{target.name}.converting"
        self.folder = self.home / "folder"
        self.replaced = self.home / "replaced"
        self.plan = self.home / "made_from.json"

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Keep other processes away until the block ends."""
        self.home.mkdir(parents=True, exist_ok=True)
        with open(self.home / "lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConvertError(f"{self.target}: another process is converting into this folder") from None
            yield

    def begin(self, plan: Mapping[str, Any], force: bool) -> bool:
        """Take up what is there, or make room for a beginning; whether anything is left to do."""
        same = self.same(plan)
        if same and not self.folder.exists() and (self.target / CONFIG).exists():
            self.remove()  # it was killed after its last step
            return False
        if self.replaced.exists() and not self.target.exists():
            os.rename(self.replaced, self.target)
        if self.target.exists() and (not self.target.is_dir() or any(self.target.iterdir())):
            if not force:
                self.remove_if(not same)
                raise unexpected(self.target, "folder", "a new one (--force replaces a model folder)", "one with files")
            if not (self.target / CONFIG).is_file():
                self.remove_if(not same)
                raise unexpected(self.target, "folder", f"a model folder with {CONFIG} to replace", "another")
        if not same:
            self.start(plan)
        self.folder.mkdir(exist_ok=True)
        return True

    def same(self, plan: Mapping[str, Any]) -> bool:
        """Whether an earlier conversion was made from the same."""
        with contextlib.suppress(ConvertError):
            return read_json(self.plan) == json.loads(json.dumps(plan))
        return False

    def start(self, plan: Mapping[str, Any]) -> None:
        """Forget what there is, and note what it is made from."""
        self.clear()
        with atomic_file(self.plan) as stream:
            stream.write(json.dumps(plan).encode())

    def has(self, name: str, layout: Layout) -> bool:
        """Whether a shard is there and reads as it was written."""
        if not (self.folder / name).exists():
            return False
        try:
            record = read_json(self.home / f"{name}.json")
            right = record["size"] == layout.size and not damaged(self.folder / name, record["parts"])
        except (ConvertError, KeyError, TypeError, ValueError):
            right = False
        if not right:
            (self.folder / name).unlink()
        return right

    def nonfinite(self, names: Iterable[str]) -> list[str]:
        """What was found in shards that are there."""
        return [tensor for name in names for tensor in read_json(self.home / f"{name}.json").get("nonfinite", [])]

    def done(self, name: str, record: Mapping[str, Any]) -> None:
        """Give a shard that was flushed and checked its name."""
        with atomic_file(self.home / f"{name}.json") as stream:
            stream.write(json.dumps(record).encode())
        os.rename(self.folder / f"{name}.part", self.folder / name)
        flush(self.folder)

    def publish(self) -> None:
        """Give the folder its final name."""
        for file in self.folder.iterdir():
            flush(file)
        flush(self.folder)
        if self.target.exists():
            shutil.rmtree(self.replaced, ignore_errors=True)
            os.rename(self.target, self.replaced)
        os.rename(self.folder, self.target)
        flush(self.target.absolute().parent)

    def clear(self) -> None:
        """Remove what there is, but the lock."""
        for path in self.home.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != "lock":
                path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove everything; a process that waits for the lock makes it anew."""
        shutil.rmtree(self.home, ignore_errors=True)

    def remove_if(self, condition: bool) -> None:
        """Leave no trace of a request that was refused, but what another has begun."""
        if condition and not self.plan.exists():
            self.remove()


def damaged(file: Path, parts: Sequence[Sequence[int]]) -> str:
    """Read a file from the disk and compare with its checksums; what is wrong, in words, or nothing.

    Args:
        file: The file.
        parts: (offset, bytes, checksum) of all of it, in order.
    """
    with open(file, "rb", buffering=0) as stream:
        return gap(parts, os.fstat(stream.fileno()).st_size) or misread(stream.fileno(), parts)


def gap(parts: Sequence[Sequence[int]], total: int) -> str:
    """Where parts, in order, do not cover a file of so many bytes; in words, or nothing."""
    position = 0
    for offset, size, _ in parts:
        if offset != position:
            return f"bytes {position} to {offset} were never written"
        position += size
    return "" if position == total else f"it has {total} bytes, of which {position} were written"


def misread(descriptor: int, parts: Sequence[Sequence[int]], told: Callable[[int], None] = lambda count: None) -> str:
    """Read parts of an open file from the disk and compare with their checksums; what is wrong, in words, or nothing.

    Args:
        descriptor: Of the file; what is not flushed may come from memory.
        parts: (offset, bytes, checksum) of each.
        told: Called with the bytes of each part that is right.
    """
    buffer = np.empty(_PART, np.uint8)
    first = min((offset for offset, _, _ in parts), default=0)
    last = max((offset + size for offset, size, _ in parts), default=0)
    first, last = first - first % mmap.PAGESIZE, last + -last % mmap.PAGESIZE
    os.posix_fadvise(descriptor, first, last - first, os.POSIX_FADV_DONTNEED)  # what is read is on the disk
    for offset, size, expected in parts:
        checksum, done = 0, 0
        while done < size:
            count = os.preadv(descriptor, [buffer[: min(size - done, _PART)].data], offset + done)
            if not count:
                return f"it ends at byte {offset + done}"
            checksum, done = zlib.crc32(buffer[:count].data, checksum), done + count
        if checksum != expected:
            return f"bytes {offset} to {offset + size} read back are not what was written"
        told(size)
    return ""
