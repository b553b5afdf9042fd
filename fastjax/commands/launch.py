"""`fastjax launch`: a command in several processes of this host, each with a GPU of its own."""

import argparse
import collections
import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import IO, NamedTuple

from convert.errors import shown
from fastjax.errors import ConfigError, Interrupted, TrainingError

#: Commands that run in several processes.
COMMANDS = ("train",)
#: Environment variable of a process that is started here: the id of this one, with which it ends.
LAUNCHER = "FASTJAX_LAUNCHER"
#: Seconds that the others have after one has ended with an error, which may be theirs, too.
PATIENCE = 3.0
#: The same after a signal, which they end with a checkpoint.
SAVING = 600.0
#: Seconds for the last lines of a process that has ended; what it has started itself may hold its output open.
_LAST_LINES = 2.0
_POLL = 0.1
#: Seconds that lines wait: those of the others about the end of the first that fails are not shown.
_LAG = 3 * _POLL


class _Line(NamedTuple):
    """A line of a process's output, and when it came."""

    time: float
    rank: int
    text: str


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Args:
        argv: the number of processes, and the command with its arguments.
    """
    parser = argparse.ArgumentParser(
        prog="fastjax launch",
        usage="fastjax launch -n N [--] train FILE [...]",
        description="Run a command in N processes of this host, one GPU each. Lines of rank 0 are shown as they are, "
        "those of the others on standard error behind their rank. When one process fails the others are ended, and the "
        "exit status is its own. Under SLURM and Open MPI the cluster starts the processes instead: srun fastjax train "
        "...; one process alone takes all GPUs that it sees.",
        allow_abbrev=False,
    )
    parser.add_argument("-n", type=int, required=True, metavar="N", help="processes")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command and its arguments")
    arguments = parser.parse_args(argv)
    command = [word for n, word in enumerate(arguments.command) if n or word != "--"]
    if arguments.n < 1:
        raise ConfigError(f"-n: expected at least 1 process, got {arguments.n}")
    if not command or command[0] not in COMMANDS:
        got = shown(command[0], 80) if command else "none"
        raise ConfigError(f"launch: expected the command {' or '.join(COMMANDS)} after the options, got {got}")
    launch(command, arguments.n)


def launch(command: Sequence[str], count: int) -> None:
    """Run a command in processes of this host until all have ended.

    Args:
        command: of fastjax, with its arguments.
        count: of the processes.

    Raises:
        TrainingError: a process failed; the others are ended.
        Interrupted: a signal came, which every process has got.
        SystemExit: with the exit status of the first process that failed by itself.
    """
    address = f"127.0.0.1:{_free_port()}"
    processes: list[subprocess.Popen[str]] = []
    readers: list[threading.Thread] = []
    lines: collections.deque[_Line] = collections.deque()
    with _forwarded(processes) as received:
        for index in range(count):
            piped = None if index == 0 else subprocess.PIPE
            arguments = [*command, "--distributed", f"{address},{count},{index},{index}"]
            process = subprocess.Popen(
                [sys.executable, "-m", "fastjax", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=piped,
                stderr=piped and subprocess.STDOUT,
                text=True,
                env=os.environ | {LAUNCHER: str(os.getpid())},
                start_new_session=True,  # a Ctrl-C reaches them once, forwarded
            )
            processes.append(process)
            if process.stdout is not None:
                readers.append(threading.Thread(target=_read, args=(index, process.stdout, lines), daemon=True))
                readers[-1].start()
        first, stopped = None, []
        try:
            first = _first_failure(processes, lines)
            stopped = [index for index, process in enumerate(processes) if _is_stopped(process.pid)]
        finally:
            killed = first is not None and first[1] < 0  # which the others cannot do without
            _end(processes, 0.0 if killed else SAVING if received else PATIENCE)
            for reader in readers:
                reader.join(_LAST_LINES)
            _show(lines, math.inf, None if received or first is None else first[0])
    if first is None:
        return
    index, status = first
    for one in stopped:  # what the first waited for in vain, most likely
        print(f"fastjax launch: rank {one} of {count} had been stopped by a signal (SIGSTOP)", file=sys.stderr)
    if status < 0:
        name = signal.Signals(-status).name
        if not received:
            raise TrainingError(f"rank {index} of {count} was ended by {name}; the others are ended too")
        raise Interrupted(f"rank {index} of {count} was ended by {name}", -status)
    print(f"fastjax launch: rank {index} of {count} ended first, with exit status {status}", file=sys.stderr)
    raise SystemExit(status)


def _first_failure(
    processes: Sequence["subprocess.Popen[str]"], lines: "collections.deque[_Line]"
) -> tuple[int, int] | None:
    """Rank and status of the first process that fails; None: none does. The others' lines are shown until then."""
    while True:
        now = time.monotonic()
        statuses = [process.poll() for process in processes]
        for index, status in enumerate(statuses):
            if status:
                return index, status
        if None not in statuses:
            return None
        _show(lines, now - _LAG)
        time.sleep(_POLL)


def _is_stopped(child: int) -> bool:
    """Whether a child stands still by a signal and has not been continued; never, where the system does not say."""
    if not hasattr(os, "waitid"):
        return False
    with contextlib.suppress(ChildProcessError):
        return os.waitid(os.P_PID, child, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    return False


def _end(processes: Sequence["subprocess.Popen[str]"], patience: float) -> None:
    """Wait for processes that end, so many seconds, then kill them."""
    end = time.monotonic() + patience
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, end - time.monotonic()))
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()


@contextlib.contextmanager
def _forwarded(processes: Sequence["subprocess.Popen[str]"]) -> Iterator[list[int]]:
    """Hand signals on to the processes; the signals that came."""
    received: list[int] = []

    def forward(number: int, _: object) -> None:
        received.append(number)
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.signal(number, forward) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _read(index: int, output: IO[str], lines: "collections.deque[_Line]") -> None:
    """Take a process's output, each line with its time."""
    with output:
        for line in output:
            lines.append(_Line(time.monotonic(), index, line))


def _show(lines: "collections.deque[_Line]", until: float, rank: int | None = None) -> None:
    """Copy lines to standard error, each behind its rank: those up to a time, of one rank or of all."""
    while lines and lines[0].time <= until:
        _, index, line = lines.popleft()
        if rank in (None, index):
            print(f"[{index}] {line}", end="", file=sys.stderr, flush=True)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
