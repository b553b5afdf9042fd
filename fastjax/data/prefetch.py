"""An iterator run ahead of its consumer, in a thread of its own.

The thread waits when `depth` values are ready, hands its exceptions over in their turn, and ends when the consumer
closes the iterator, wherever it stands. NumPy, the tokenizer and the copy to a device release Python's lock, so the
two sides do run at the same time.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class _Failed:
    """An exception on its way to the consumer."""

    def __init__(self, error: BaseException):
        self.error = error


_END = object()


class Prefetched(Generic[T]):
    """An iterator whose next values are made while the last one is used; a context manager, closed at its end."""

    def __init__(self, iterator: Iterator[Any], depth: int, transform: Callable[[Any], T] | None = None):
        """Start the thread; see `prefetched`."""
        self._queue: queue.Queue[Any] = queue.Queue(depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=_run, args=(iterator, transform, self._queue, self._stop), name="fastjax-prefetch", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> "Prefetched[T]":
        return self

    def __next__(self) -> T:
        if self._stop.is_set():
            raise StopIteration
        value = self._queue.get()
        if value is _END:
            self.close()
            raise StopIteration
        if isinstance(value, _Failed):
            self.close()
            raise value.error
        return value

    def close(self) -> None:
        """End the thread and wait for it; what was made ahead is lost. The iterator is over then."""
        self._stop.set()
        while self._thread.is_alive():
            try:  # the thread may wait for room
                self._queue.get_nowait()
            except queue.Empty:
                self._thread.join(0.01)

    def __enter__(self) -> "Prefetched[T]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def prefetched(iterator: Iterator[Any], depth: int = 2, transform: Callable[[Any], T] | None = None) -> "Prefetched[T]":
    """Run an iterator ahead in a thread.

    Args:
        iterator: What to run; if it can be closed, it is, in the thread.
        depth: Values that may be ready and wait; one more may be in the making.
        transform: Applied to each value in the thread, for instance to put it on a device; None: nothing.

    Returns:
        The same values in the same order. An exception of either is raised where its value would have come.
        Close it (`with prefetched(…) as values`) to end it early.
    """
    return Prefetched(iterator, depth, transform)


def _run(
    iterator: Iterator[Any], transform: Callable[[Any], Any] | None, values: queue.Queue[Any], stop: threading.Event
) -> None:
    last: Any = _END
    try:
        for value in iterator:
            if stop.is_set():
                break
            value = value if transform is None else transform(value)
            values.put(value)
            if stop.is_set():
                break
    except BaseException as error:
        last = _Failed(error)
    finally:
        close = getattr(iterator, "close", None)
        if close is not None:
            close()
    if not stop.is_set():
        values.put(last)
