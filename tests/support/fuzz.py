"""Runs many hostile inputs through a reader: each is read or refused in one sentence, in bounded time and memory."""

import os
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

SECONDS = 2.0
"""Limit of processor time, for one input."""

GROWTH = 2**30
"""Bytes that the process may take beyond what it has, for all inputs together."""

CHARACTERS = 5000
"""Fewer than these has a message."""

_SHOWN = 12


class _TooSlow(BaseException):
    """No reader catches it."""


def fuzz(
    kind: str,
    count: int,
    make: Callable[[random.Random, int], Any],
    read: Callable[[Any], bool | None],
    expected: tuple[type[Exception], ...],
    known: Iterable[Any] = (),
) -> None:
    """Read inputs, print the counts, and fail with all errors, one example a place in the code.

    Args:
        kind: Name of the inputs; the seed, with an input's number.
        count: Number of inputs.
        make: Makes the input of a number.
        read: The tested reader; False: it refused the input itself.
        expected: The project's own exceptions.
        known: Valid inputs, which must be read.
    """
    for right in known:
        assert read(right) is not False, right
    slowest, refused, wrong = 0.0, 0, {}
    begin, before = time.monotonic(), _resident()
    with _Limits() as limits:
        for number in range(count):
            given = make(random.Random(f"{kind} {number}"), number)
            start = limits.start()
            try:
                refused += read(given) is False
                problem = None
            except expected as error:
                message, where = str(error), type(error).__name__
                problem = None if 0 < len(message) < CHARACTERS else f"a message of {len(message)} characters"
                refused += problem is None
            except (Exception, _TooSlow) as error:
                problem = "".join(traceback.format_exception(error)[-4:])[-1500:]
                where = (type(error).__name__, *_place(error))
            taken = limits.stop(start)
            slowest = max(slowest, taken)
            if problem is None and taken > SECONDS:
                problem, where = f"took {taken:.1f} s", "slow"
            if problem is not None:
                wrong.setdefault(where, [0, f"{kind} {number}: {problem}\n{_shown(given)}"])[0] += 1
    growth = (_resident() - before) / 2**20
    mistakes = sum(times for times, _ in wrong.values())
    print(
        f"{kind}: {count} inputs, {count - refused - mistakes} read, {refused} refused, {mistakes} wrong; "
        f"slowest {slowest:.2f} s, growth {growth:.0f} MiB, {time.monotonic() - begin:.1f} s in all"
    )
    found = [f"{times} times: {example}" for times, example in wrong.values()]
    assert not found, "\n\n".join([f"{len(found)} kinds of mistake", *found[:_SHOWN]])
    assert growth * 2**20 < GROWTH
    assert count < 100 or 0 < refused, "inputs that prove nothing"


class _Limits:
    """Limits of the process: its address space, and a signal after too long an input."""

    def __enter__(self) -> "_Limits":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        self.limits = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + GROWTH, self.limits[1]))
        self.handler = signal.signal(signal.SIGPROF, self._raise)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGPROF, self.handler)
        resource.setrlimit(resource.RLIMIT_AS, self.limits)

    @staticmethod
    def _raise(*_: object) -> None:
        raise _TooSlow(f"more than {SECONDS:g} s of processor time")

    def start(self) -> float:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        return time.process_time()

    def stop(self, start: float) -> float:
        signal.setitimer(signal.ITIMER_PROF, 0)
        return time.process_time() - start


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _place(error: BaseException) -> tuple[str, int]:
    """The innermost line of the project's packages that an exception comes from."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [place for place in frames if "/convert/" in place[0] or "/fastjax/" in place[0]]
    return (own or frames)[-1]


def _shown(given: Any) -> str:
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return ascii(given)[:1500]
    finally:
        sys.set_int_max_str_digits(limit)
