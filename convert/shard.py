"""One file of weights while it is being written: parts of tensors at their places, and the checksums to check it by."""

import os
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from convert.errors import ConvertError
from convert.tensor_file import Layout
from convert.unfinished import Unfinished, damaged

Monitor = Callable[[int, int], None]
_FLUSH = 2**27  # bytes


class Part(NamedTuple):
    """Some consecutive elements of a tensor.

    Attributes:
        name: The tensor's.
        first: Index of the first element, row by row.
        values: Flat, of the tensor's dtype.
    """

    name: str
    first: int
    values: np.ndarray


class Job(NamedTuple):
    """Tensors that are made together, from one tensor of the source.

    Attributes:
        outputs: Name -> (dtype, shape).
        run: Makes their parts, in any order, each element once.
        source: The file or folder they are made from, for messages.
    """

    outputs: Mapping[str, tuple[np.dtype, tuple[int, ...]]]
    run: Callable[[], Iterator[Part]]
    source: str | os.PathLike[str] = ""


class Counter:
    """Bytes done, told to the monitor by one thread at a time."""

    def __init__(self, monitor: Monitor | None, total: int):
        self.monitor, self.total, self.done, self.lock = monitor, total, 0, threading.Lock()

    def add(self, count: int) -> None:
        """Tell of so many more."""
        with self.lock:
            self.done += count
            if self.monitor is not None:
                self.monitor(self.done // 2, self.total // 2)


class Shard:
    """One file while it is being written, under a temporary name."""

    def __init__(
        self, file: Path, layout: Layout, allow: bool, stop: threading.Event, counter: Counter, flusher: Executor
    ):
        self.file, self.layout, self.allow, self.stop, self.counter = file, layout, allow, stop, counter
        self.parts: list[tuple[int, int, int]] = []  # (offset, bytes, checksum)
        self.nonfinite: list[str] = []
        self.flusher, self.flushes, self.unflushed = flusher, [], 0
        self.descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        os.ftruncate(self.descriptor, layout.size)
        self._write(0, np.frombuffer(layout.header, np.uint8))

    def fill(self, job: Job) -> None:
        """Write what a job makes."""
        for part in job.run():
            if self.stop.is_set():
                return
            info = self.layout.tensors[part.name]
            if part.values.dtype != np.dtype(info.dtype):
                raise ConvertError(f"{self.file}: {part.name}: made as {part.values.dtype}, planned as {info.dtype}")
            if not is_finite(part.values) and part.name not in self.nonfinite:
                if not self.allow:
                    raise ConvertError(
                        f"{job.source}: {part.name}: expected finite values, got NaN or infinity (in the weights read, "
                        f"or where {info.dtype} cannot hold the result); they are written if these are allowed"
                    )
                self.nonfinite.append(part.name)
            values = np.ascontiguousarray(part.values).view(np.uint8)
            self._write(info.start + part.first * np.dtype(info.dtype).itemsize, values)

    def close(self, state: Unfinished, name: str) -> None:
        """Flush the file, read it back, compare, and give it its name."""
        try:
            for flushed in self.flushes:  # an error is told once, to the first who asks
                flushed.result()
            os.fsync(self.descriptor)
        finally:
            os.close(self.descriptor)
        parts = sorted(self.parts)
        if sum(size for _, size, _ in parts) != self.layout.size:
            raise ConvertError(f"{self.file}: not every tensor was made whole")
        wrong = damaged(self.file, parts, self.counter.add)
        if wrong:
            raise ConvertError(f"{self.file}: {wrong}; the disk or the memory is faulty")
        state.done(name, {"size": self.layout.size, "parts": parts, "nonfinite": self.nonfinite})

    def _write(self, offset: int, values: np.ndarray) -> None:
        self.parts.append((offset, values.nbytes, zlib.crc32(values.data)))
        view = values.data
        while view:
            count = os.pwrite(self.descriptor, view, offset)
            view, offset = view[count:], offset + count
        self.counter.add(values.nbytes)
        self.unflushed += values.nbytes
        if self.unflushed >= _FLUSH:  # early, so that the disk is busy while the next parts are computed
            self.unflushed = 0
            self.flushes.append(self.flusher.submit(os.fdatasync, self.descriptor))


def is_finite(values: np.ndarray) -> bool:
    """Whether no value is NaN or infinite; whole numbers never are.

    Args:
        values: Any dtype of a checkpoint.
    """
    if values.dtype.kind in "iub" or values.size == 0:
        return True
    exponent = {"bfloat16": 0x7F80, "float16": 0x7C00}.get(values.dtype.name)
    if exponent is not None:  # three times as fast as isfinite
        return bool((values.view(np.uint16) & np.uint16(0x7FFF)).max() < exponent)
    return bool(np.isfinite(values).all())
