"""SIGTERM, SIGHUP and Ctrl-C end the loop after its current step."""

import contextlib
import errno
import os
import signal
import sys
import termios
import threading
from types import FrameType, TracebackType

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fastjax.training.loop import Loop, Observer


class StopSignals(Observer):
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

    def after(self, loop: Loop) -> None:
        """Tell the loop."""
        loop.signalled = self.received is not None

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


class SharedStop(Observer):
    """The signal that ends the processes of a run at the same step: one that any of them has got.

    Each step they say what they have got, and read what all had got at the step before: nothing waits for it.

    Attributes:
        received: as of `StopSignals`, the same in all processes.
    """

    def __init__(self, own: StopSignals, mesh: Mesh):
        """Agree by the devices.

        Args:
            own: of this process.
            mesh: of the run.
        """
        self.received: signal.Signals | None = None
        self._own, self._sent = own, None
        self._flags = NamedSharding(mesh, P(mesh.axis_names))
        self._largest = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, P()))
        self._size = mesh.size

    def after(self, loop: Loop) -> None:
        """Read what was sent a step ago, and send what came since; every process, once a step."""
        if self._sent is not None and self.received is None and (found := int(self._sent)):
            self.received = signal.Signals(found)
        number = 0 if self._own.received is None else int(self._own.received)
        flags = np.full(self._size, number, np.int32)
        self._sent = self._largest(jax.make_array_from_callback(flags.shape, self._flags, lambda index: flags[index]))
        loop.signalled = self.received is not None


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
