"""A thread that ends a process whose step, evaluation or save does not end, with the place where it stands.

A collective waits for ever for a device that does not come: a process that died, a kernel that hangs, a disk that is
gone. How long a step may take follows from the slowest of the last ones. The message names the step and what was waited
for; Python's stacks show where.
"""

import faulthandler
import os
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

from fastjax.training.loop import Observer

#: Exit status of a process that the watchdog ends.
STATUS = 1
#: Seconds, and times the slowest of the last, that something may take which has come before.
FLOOR, TIMES = 300.0, 10
#: Seconds after which the process ends even if a part of its last message hangs.
_AT_MOST = 60.0


class Watchdog(Observer):
    """A context in which each thing that is waited for must come in time."""

    def __init__(self, timeout: float | None, folder: Path, rank: int, name: str | None = None):
        """Make it; the thread begins with the context.

        Args:
            timeout: seconds that anything may take; None: nothing is watched.
            folder: gets `stacks-RANK.txt`.
            rank: of the process.
            name: of the process, for the message; None: it is the only one.
        """
        self._timeout, self._file, self._name = timeout, folder / f"stacks-{rank}.txt", name
        self._waits: tuple[float, str, float | None] | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fastjax-watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self._timeout is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._over.set()

    def waits(self, what: str | None, usual: float | None = None) -> None:
        """Begin to wait for something new.

        Args:
            what: in words, as "the numbers of step 7"; None: nothing that is watched.
            usual: seconds that the slowest of the last has taken; None: that says nothing about this one.
        """
        self._waits = None if what is None else (time.monotonic(), what, usual)

    def restart(self) -> None:
        """Begin to wait anew: a part has come of what is waited for."""
        if self._waits is not None:
            self.waits(*self._waits[1:])

    def _run(self) -> None:
        assert self._timeout is not None
        while not self._over.wait(min(1.0, self._timeout / 4)):
            if (waits := self._waits) is None:
                continue
            began, what, usual = waits
            limit = self._timeout if usual is None else min(self._timeout, FLOOR + TIMES * usual)
            if time.monotonic() - began > limit:
                why = "training.step_timeout" if limit == self._timeout else f"the last took {usual:.3g} s at most"
                self._end(f"{limit:.4g} s ({why}) for {what}")

    def _end(self, waited: str) -> None:
        message = f"{'' if self._name is None else f'{self._name}: '}waited {waited}"
        stderr = sys.__stderr__ or sys.stderr
        faulthandler.dump_traceback_later(_AT_MOST, exit=True, file=stderr)
        try:
            text = f"\nfastjax: error: {message}; the stacks of its threads follow, and are in {self._file}"
            print(text, file=stderr, flush=True)
            faulthandler.dump_traceback(stderr)
            with open(self._file, "w", encoding="utf-8") as file:
                print(message, file=file, flush=True)
                faulthandler.dump_traceback(file)
        finally:
            os._exit(STATUS)
