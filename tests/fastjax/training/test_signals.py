"""The first signal is noted, a second Ctrl-C ends the process; handlers are put back."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from fastjax.training.signals import StopSignals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
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
