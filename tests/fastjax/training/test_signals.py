"""The first signal is noted, a second Ctrl-C ends the process; handlers are put back."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from fastjax.training.signals import StopSignals


@pytest.fixture(autouse=True)
def heard():
    """A hangup is not ignored, as it is where tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_first_signal_is_noted(number, capfd):
    before = signal.getsignal(number)
    with StopSignals() as stop:
        assert stop.received is None
        os.kill(os.getpid(), number)
        assert stop.received == number
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received == number
    assert signal.getsignal(number) is before
    assert capfd.readouterr().err.strip().startswith(f"fastjax: {number.name}: finishing the step and saving")


def test_a_second_ctrl_c_ends_at_once():
    code = (
        "import os, signal, time\nfrom fastjax.training.signals import StopSignals\n"
        "with StopSignals():\n    os.kill(os.getpid(), signal.SIGINT)\n    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(60)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=30).returncode == 130


def test_a_hangup_that_is_ignored_stays_so(monkeypatch):
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.received is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_terminal_that_goes_away():
    """Its hangup is noted, and what is written afterwards, at exit too, is no error."""
    code = (
        "import fcntl, sys, termios, time\nfcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
        "from fastjax.training.signals import StopSignals\n"
        "with StopSignals() as stop:\n    print('ready', flush=True)\n"
        "    while stop.received is None:\n        time.sleep(0.01)\n"
        "    print('x' * 10_000, flush=True)\n    print('y', file=sys.stderr, flush=True)\n    print('z')\n"
        "sys.exit(128 + stop.received)\n"
    )
    master, terminal = os.openpty()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, **streams)
    os.close(terminal)
    assert b"ready" in os.read(master, 100)
    os.close(master)
    assert process.wait(30) == 129


def test_other_threads_catch_nothing():
    before = signal.getsignal(signal.SIGTERM)
    found = []

    def enter():
        with StopSignals() as stop:
            found.append((stop.received, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert found == [(None, before)]
