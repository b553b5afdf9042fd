"""One file of weights in the making: parts of tensors in their places, with checksums for reading back.

Parts that have been read back are noted beside the file, so that an interrupted conversion keeps the tensors that were
whole.
"""

import bisect
import itertools
import json
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import NamedTuple

import numpy as np

from convert.errors import ConvertError
from convert.finite import is_finite, nonfinite
from convert.tensor_file import Layout
from convert.unfinished import Unfinished, gap, misread

Monitor = Callable[[int, int], None]
_CHECK = 2**27  # bytes flushed and read back together
_Range = tuple[int, int, int]  # offset, bytes, checksum


class Chunk(NamedTuple):
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
    run: Callable[[], Iterator[Chunk]]
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
    """One unfinished file under a temporary name; written parts are read back while others are computed.

    Attributes:
        jobs: Those whose tensors are not there yet.
        kept: Number of tensors that an interrupted conversion had made.
        nonfinite: Tensors with NaN or infinity.
    """

    def __init__(
        self,
        state: Unfinished,
        name: str,
        layout: Layout,
        jobs: Sequence[Job],
        *,
        allow: bool,
        stop: threading.Event,
        counter: Counter,
        checker: Executor,
    ):
        self.state, self.name, self.layout = state, name, layout
        self.allow, self.stop, self.counter = allow, stop, counter
        self.file, self.journal = state.folder / f"{name}.part", state.home / f"{name}.parts"
        self.parts: list[_Range] = []  # read back
        self.written: list[_Range] = []  # not yet
        self.nonfinite: list[str] = []
        self.checker, self.checks, self.unchecked, self.lock = checker, [], 0, threading.Lock()
        self.descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT, 0o644)
        self.jobs = self._resume(jobs)
        self.kept = len(layout.tensors) - sum(len(job.outputs) for job in self.jobs)
        self.begins = {layout.size, *(offset for offset, _, _ in self.parts)}  # of the parts in the file
        self.ends = {0, *(offset + size for offset, size, _ in self.parts)}
        os.ftruncate(self.descriptor, layout.size)
        self._write(0, np.frombuffer(layout.header, np.uint8))
        position = len(layout.header)
        for start, end in [(info.start, info.start + info.nbytes) for info in layout.tensors.values()]:
            self._pad(position, start)
            position = end
        self._pad(position, layout.size)

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

    def close(self) -> None:
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
        self.state.done(self.name, {"size": self.layout.size, "parts": parts, "nonfinite": self.nonfinite})

    def _resume(self, jobs: Sequence[Job]) -> list[Job]:
        """Take over what an interrupted conversion made whole, if the file still has it; return the other jobs."""
        tensors = {name: info for name, info in self.layout.tensors.items() if info.nbytes}
        starts = {info.start: name for name, info in tensors.items()}
        offsets, sizes = sorted(starts), dict.fromkeys(self.layout.tensors, 0)
        parts: dict[_Range, str] = {}
        try:
            notes = [json.loads(line) for line in self.journal.read_text(encoding="utf-8").splitlines()]
            for offset, size, checksum in itertools.chain.from_iterable(note["parts"] for note in notes):
                name = starts.get(offsets[bisect.bisect(offsets, offset) - 1], "")
                if tensors[name].start <= offset < tensors[name].start + tensors[name].nbytes:
                    parts[offset, size, checksum] = name
                    sizes[name] += size
            whole = {name for name, info in self.layout.tensors.items() if sizes[name] == info.nbytes}
            finished = {name for job in jobs if whole.issuperset(job.outputs) for name in job.outputs}
            self.parts = [part for part, name in parts.items() if name in finished]
            if misread(self.descriptor, self.parts):
                raise ValueError
            self.nonfinite = sorted(finished.intersection(name for note in notes for name in note["nonfinite"]))
        except (OSError, ValueError, TypeError, LookupError):
            self.parts, finished = [], set()
        self.journal.unlink(missing_ok=True)
        self._note(self.parts)
        self.counter.add(2 * sum(size for _, size, _ in self.parts))
        return [job for job in jobs if not finished.issuperset(job.outputs)]

    def _note(self, parts: Sequence[_Range]) -> None:
        with open(self.journal, "a", encoding="utf-8") as stream:
            stream.write(json.dumps({"parts": parts, "nonfinite": self.nonfinite}) + "\n")

    def _pad(self, start: int, end: int) -> None:
        """Write the zeros between two tensors, where a format aligns them."""
        if end > start:
            self._write(start, np.zeros(end - start, np.uint8))

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

    def _check(self, parts: Sequence[_Range]) -> None:
        """Flush parts, read them back, compare and note them."""
        os.fdatasync(self.descriptor)
        wrong = misread(self.descriptor, parts, self.counter.add)
        if wrong:
            raise ConvertError(f"{self.file}: {wrong}; the disk or the memory is faulty")
        self.parts += parts
        self._note(parts)
