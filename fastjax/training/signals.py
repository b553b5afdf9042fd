"""SIGTERM, SIGHUP and Ctrl-C end the loop after its current step."""

import contextlib
import errno
import os
import signal
import sys
import termios
import threading
from types import FrameType, TracebackType


class StopSignals:
    """A context that records the first SIGTERM, SIGHUP or SIGINT; a second SIGINT ends the process at once.

    A SIGHUP that is ignored, as under nohup, stays ignored. If the terminal is lost with it, later output to it is
    dropped. Signals reach only the main thread; entered in another, the context catches nothing.

    Attributes:
        received: the first signal; None: none.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]
        self._previous.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            if sys.stdout.isatty():
                os.write(sys.stdout.fileno(), b"\x1b[?25h\n")  # a live line has hidden the cursor
            os._exit(128 + number)
        if number == signal.SIGHUP:
            _drop_lost_terminal()
        if self.received is None:
            self.received = signal.Signals(number)
            again = "; Ctrl-C again ends at once" if number == signal.SIGINT else ""
            with contextlib.suppress(OSError):  # its reader may be gone too
                os.write(2, f"\nfastjax: {self.received.name}: finishing the step and saving{again}\n".encode())


def _drop_lost_terminal() -> None:
    """Redirect a lost terminal's standard output and error to nowhere; writes would raise."""
    for stream in (1, 2):
        try:
            termios.tcgetattr(stream)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream)
                os.close(nowhere)
