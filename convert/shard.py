"""One file of weights in the making: parts of tensors in their places, with checksums for reading back."""

import os
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from convert.errors import ConvertError
from convert.finite import is_finite, nonfinite
from convert.tensor_file import Layout
from convert.unfinished import Unfinished, gap, misread

Monitor = Callable[[int, int], None]
_CHECK = 2**27  # bytes flushed and read back together


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
    """Tensors made together from one tensor of the source.

    Attributes:
        outputs: Name -> (dtype, shape).
        run: Makes their parts, in any order, each element once.
        source: Their file or folder, for messages.
    """

    outputs: Mapping[str, tuple[np.dtype, tuple[int, ...]]]
    run: Callable[[], Iterator[Part]]
    source: str | os.PathLike[str] = ""


class Counter:
    """Bytes done; one thread at a time tells the monitor."""

    def __init__(self, monitor: Monitor | None, total: int):
        self.monitor, self.total, self.done, self.lock = monitor, total, 0, threading.Lock()

    def add(self, count: int) -> None:
        """Count further bytes."""
        with self.lock:
            self.done += count
            if self.monitor is not None:
                self.monitor(self.done // 2, self.total // 2)


class Shard:
    """One unfinished file under a temporary name; written parts are read back while others are computed."""

    def __init__(
        self, file: Path, layout: Layout, allow: bool, stop: threading.Event, counter: Counter, checker: Executor
    ):
        self.file, self.layout, self.allow, self.stop, self.counter = file, layout, allow, stop, counter
        self.parts: list[tuple[int, int, int]] = []  # (offset, bytes, checksum), checked
        self.written: list[tuple[int, int, int]] = []  # not yet
        self.begins, self.ends = {layout.size}, {0}  # of the written parts
        self.nonfinite: list[str] = []
        self.checker, self.checks, self.unchecked, self.lock = checker, [], 0, threading.Lock()
        self.descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        os.ftruncate(self.descriptor, layout.size)
        self._write(0, np.frombuffer(layout.header, np.uint8))

    def fill(self, job: Job) -> None:
        """Write a job's parts."""
        for part in job.run():
            if self.stop.is_set():
                return
            info = self.layout.tensors[part.name]
            if part.values.dtype != np.dtype(info.dtype):
                raise ConvertError(f"{self.file}: {part.name}: made as {part.values.dtype}, planned as {info.dtype}")
            if not is_finite(part.values) and part.name not in self.nonfinite:
                if not self.allow:
                    raise nonfinite(job.source, part.name, where=f"where {info.dtype} cannot hold the result")
                self.nonfinite.append(part.name)
            values = np.ascontiguousarray(part.values).view(np.uint8)
            self._write(info.start + part.first * np.dtype(info.dtype).itemsize, values)

    def close(self, state: Unfinished, name: str) -> None:
        """Flush the file, check the remaining parts, and give it its name."""
        try:
            for check in self.checks:  # an error is told once, to the first who asks
                check.result()
            os.fsync(self.descriptor)
            self._check(self.written)
            parts = sorted(self.parts)
            missing = gap(parts, os.fstat(self.descriptor).st_size)
        finally:
            os.close(self.descriptor)
        if missing:
            raise ConvertError(f"{self.file}: {missing}: not every tensor was made whole")
        state.done(name, {"size": self.layout.size, "parts": parts, "nonfinite": self.nonfinite})

    def _write(self, offset: int, values: np.ndarray) -> None:
        part = offset, values.nbytes, zlib.crc32(values.data)
        view, end = values.data, offset + values.nbytes
        while view:
            count = os.pwrite(self.descriptor, view, end - len(view))
            view = view[count:]
        self.counter.add(values.nbytes)
        with self.lock:
            self.written.append(part)
            self.begins.add(offset)
            self.ends.add(end)
            self.unchecked += values.nbytes
            if self.unchecked < _CHECK:
                return
            # Not parts that share a page of the disk with unwritten ones.
            ready = [part for part in self.written if part[0] in self.ends and part[0] + part[1] in self.begins]
            self.written, self.unchecked = sorted({*self.written}.difference(ready)), 0
        self.checks.append(self.checker.submit(self._check, ready))

    def _check(self, parts: Sequence[tuple[int, int, int]]) -> None:
        """Flush parts, read them back and compare."""
        os.fdatasync(self.descriptor)
        wrong = misread(self.descriptor, parts, self.counter.add)
        if wrong:
            raise ConvertError(f"{self.file}: {wrong}; the disk or the memory is faulty")
        self.parts += parts
