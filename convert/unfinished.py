"""An unfinished folder or file: its place, its inputs' fingerprints, and its finished parts.

Beside the final path, in ``.NAME.converting``: the folder itself, ``made_from.json``, a JSON file with checksums for
each finished file, a lock, and during a replacement the earlier folder.
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

_PART = 2**23  # bytes per read of a check


class Unfinished:
    """An unfinished folder, or file, and its records: ``made_from.json``, and one JSON file per shard.

    Args:
        target: The final path.
        file: Whether it is one file, not a folder.
    """

    def __init__(self, target: Path, *, file: bool = False):
        self.target, self.file = target, file
        self.home = target.absolute().parent / f".{target.name}.converting"
        self.folder = self.home / "folder"
        self.replaced = self.home / "replaced"
        self.inputs = self.home / "made_from.json"

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Lock out other processes until the block ends."""
        self.home.mkdir(parents=True, exist_ok=True)
        with open(self.home / "lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConvertError(f"{self.target}: another process is converting into this folder") from None
            yield

    def begin(self, inputs: Mapping[str, Any], force: bool) -> bool:
        """Resume, or clear the way for a start; returns whether anything is left to do."""
        same = False
        with contextlib.suppress(ConvertError):
            same = read_json(self.inputs) == json.loads(json.dumps(inputs))
        if same and not self.folder.exists() and (self.target if self.file else self.target / CONFIG).exists():
            self.remove()  # killed after its last step
            return False
        if self.file and self.target.exists() and not force:
            self.remove_if(not same)
            raise unexpected(self.target, "file", "a new one (--force or force=True replaces a file)", "one")
        if self.replaced.exists() and not self.target.exists():
            os.rename(self.replaced, self.target)
        if not self.file and self.target.exists() and (not self.target.is_dir() or any(self.target.iterdir())):
            if not force:
                self.remove_if(not same)
                raise unexpected(
                    self.target,
                    "folder",
                    "a new one (--force or force=True replaces a model folder)",
                    "one with files",
                )
            if not (self.target / CONFIG).is_file():
                self.remove_if(not same)
                raise unexpected(self.target, "folder", f"a model folder with {CONFIG} to replace", "another")
        if not same:
            self.clear()
            with atomic_file(self.inputs) as stream:
                stream.write(json.dumps(inputs).encode())
        self.folder.mkdir(exist_ok=True)
        return True

    def has(self, name: str, layout: Layout) -> bool:
        """Whether a shard exists and matches its checksums."""
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
        """Tensors with non-finite values in finished shards."""
        return [tensor for name in names for tensor in read_json(self.home / f"{name}.json").get("nonfinite", [])]

    def done(self, name: str, record: Mapping[str, Any]) -> None:
        """Give a flushed and checked shard its final name."""
        with atomic_file(self.home / f"{name}.json") as stream:
            stream.write(json.dumps(record).encode())
        os.rename(self.folder / f"{name}.part", self.folder / name)
        flush(self.folder)

    def publish(self) -> None:
        """Give the folder, or the file, its final name."""
        for file in self.folder.iterdir():
            flush(file)
        flush(self.folder)
        if self.file:
            os.replace(self.folder / self.target.name, self.target)
            self.folder.rmdir()
        else:
            if self.target.exists():
                shutil.rmtree(self.replaced, ignore_errors=True)
                os.rename(self.target, self.replaced)
            os.rename(self.folder, self.target)
        flush(self.target.absolute().parent)

    def clear(self) -> None:
        """Remove everything except the lock."""
        for path in self.home.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != "lock":
                path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove everything; a process waiting for the lock creates it anew."""
        shutil.rmtree(self.home, ignore_errors=True)

    def remove_if(self, condition: bool) -> None:
        """Remove the traces of a refused request, but not another's work."""
        if condition and not self.inputs.exists():
            self.remove()


def damaged(file: Path, parts: Sequence[Sequence[int]]) -> str:
    """Compare a file on the disk with its checksums; returns the mismatch in words, empty for none.

    Args:
        file: The file.
        parts: (offset, bytes, checksum), covering the file in order.
    """
    with open(file, "rb", buffering=0) as stream:
        return gap(parts, os.fstat(stream.fileno()).st_size) or misread(stream.fileno(), parts)


def gap(parts: Sequence[Sequence[int]], total: int) -> str:
    """The first gap that ordered parts leave in a file of `total` bytes, in words; empty for none."""
    position = 0
    for offset, size, _ in parts:
        if offset != position:
            return f"bytes {position} to {offset} were never written"
        position += size
    return "" if position == total else f"it has {total} bytes, of which {position} were written"


def misread(descriptor: int, parts: Sequence[Sequence[int]], told: Callable[[int], None] = lambda count: None) -> str:
    """Compare parts of an open file on the disk with their checksums; returns the mismatch in words, empty for none.

    Args:
        descriptor: Descriptor of the file; unflushed bytes may come from memory.
        parts: (offset, bytes, checksum) of each.
        told: Called with the bytes of each correct part.
    """
    buffer = np.empty(_PART, np.uint8)
    first = min((offset for offset, _, _ in parts), default=0)
    last = max((offset + size for offset, size, _ in parts), default=0)
    first, last = first - first % mmap.PAGESIZE, last + -last % mmap.PAGESIZE
    os.posix_fadvise(descriptor, first, last - first, os.POSIX_FADV_DONTNEED)  # read from the disk, not the page cache
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
