"""A thread that runs an iterator ahead of its consumer.

The thread waits when `depth` values are ready, passes exceptions on in order, and ends as soon as the consumer closes
the iterator. NumPy, the tokenizer and the copy to a device release Python's lock, so both sides run at the same time.
"""

import queue
import threading
from collections.abc import Iterator
from typing import Any, Generic, Self, TypeVar

T = TypeVar("T")


class _Failed:
    """An exception on its way to the consumer."""

    def __init__(self, error: BaseException):
        self.error = error


_END = object()


class Prefetched(Generic[T]):
    """An iterator with its next values computed in a thread, in order; a context manager that closes it.

    An exception of the iterator is raised in place of its value.
    """

    def __init__(self, iterator: Iterator[T], depth: int = 2):
        """Start the thread.

        Args:
            iterator: The iterator; if it has `close`, the thread calls it.
            depth: Values ready at most; one more may be in progress.
        """
        self._queue: queue.Queue[Any] = queue.Queue(depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=_run, args=(iterator, self._queue, self._stop), name="fastjax-prefetch", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> Self:
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
        """End the thread and the iterator; values computed ahead are lost."""
        self._stop.set()
        while self._thread.is_alive():
            try:  # the thread may wait for room
                self._queue.get_nowait()
            except queue.Empty:
                self._thread.join(0.01)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _run(iterator: Iterator[Any], values: queue.Queue[Any], stop: threading.Event) -> None:
    last: Any = _END
    try:
        for value in iterator:
            if stop.is_set():
                break
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
