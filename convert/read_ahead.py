"""Results in their order, of which threads compute the next ones while one is used."""

import collections
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")

#: Reading fresh memory full out of the page cache keeps a core busy at 2 to 4 GB/s; a GPU takes more.
_THREADS = 4


def read_ahead(reads: Iterable[tuple[int, Callable[[], Result]]], ahead: int) -> Iterator[Result]:
    """Call functions on threads, and give their results in order.

    Args:
        reads: the size of each one's result in bytes, and the function.
        ahead: most bytes of results that are there, or under way, and not yet asked for; the next one may be larger.

    Raises:
        Exception: what a function raised, when its turn comes.
    """
    pending: collections.deque[tuple[int, Future[Result]]] = collections.deque()
    waiting = 0
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="read") as pool:
        try:
            for size, read in reads:
                while pending and waiting + size > ahead:
                    waiting -= pending[0][0]
                    yield pending.popleft()[1].result()
                pending.append((size, pool.submit(read)))
                waiting += size
            while pending:
                yield pending.popleft()[1].result()
        finally:  # nobody asks for the rest
            pool.shutdown(cancel_futures=True)
