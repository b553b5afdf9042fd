"""`fastjax launch`: a run of two processes that is killed, stopped and resumed is the run of one process."""

import contextlib
import os
import random
import signal
import subprocess
import time

import numpy as np
import pytest
import yaml

from fastjax.cli import main
from fastjax.commands import launch
from tests.support import chat
from tests.support.runs import Process, assert_gone, figures, result, rows

#: Enough for a kill and a signal in between.
STEPS = 60
#: For the second of two processes: its second checkpoint meets a bug.
FAILING = """
import sys
from concurrent.futures import ThreadPoolExecutor

def submit(self, *arguments):
    if self._thread_name_prefix == "checkpoint":
        calls.append(1)
        if len(calls) == 3:  # after the first, which imports
            raise KeyError("a bug of one rank")
    return plain(self, *arguments)

if sys.orig_argv[-1].endswith(",2,1,1"):
    calls, plain = [], ThreadPoolExecutor.submit
    ThreadPoolExecutor.submit = submit
"""
#: float32: a sum over devices is another order of the same terms, which Adam's division carries on.
TOLERANCE = 1e-4
#: Enough for twenty disturbances, of processes that share the weights.
LONG = ["--training.max_steps", "240", "--parallel.fsdp", "2"]
DISTURBED = (
    "tests/fastjax/cli/test_launched_result.py::test_a_full_disk_and_a_kill_and_the_result_is_gathered_from_both"
)
FULL = "the disk is full"


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Starts runs of full fine-tuning in two processes; `alone`, in one. All have the same four rows a step."""
    folder = tmp_path_factory.mktemp("world")
    content = {
        "model": {
            "model_name": str(chat.write_model(folder / "model")),
            "max_seq_length": 48,
            "dtype": "float32",
            "load_in_4bit": False,
            "full_finetuning": True,
        },
        "data": {"train": str(chat.write_chats(folder / "chats.jsonl")), "cache_dir": None},
        "optimizer": {"lr_scheduler_type": "constant", "adam_epsilon": 1e-3},
        "training": {"max_steps": STEPS, "per_device_train_batch_size": 2, "logging_steps": 1},
        "output": {"output_dir": "given on the command line", "save_steps": 4},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(content))

    def begin(output, *arguments, resume=True, count=2):
        return Process(["launch", "-n", str(count), "--", *train(output, resume), *arguments], folder / "compiled")

    def train(output, resume=True):
        found = ["train", "--config", str(folder / "run.yaml"), "--output.output_dir", str(output)]
        return [*found, "--resume"] if resume else found

    def alone(output):
        """In the process of the tests, on one of its devices; returns the exit status."""
        one = ["--training.per_device_train_batch_size", "4", "--parallel.data", "1", "--parallel.fsdp", "1"]
        return main([*train(output), *one])

    begin.alone = alone
    return begin


@pytest.mark.exhaustive(
    by="tests/fastjax/cli/test_launched_result.py::test_a_full_disk_and_a_kill_and_the_result_is_gathered_from_both, "
    "tests/fastjax/cli/test_cli.py::test_processes_that_a_signal_stops_wait_for_each_other"
)
def test_two_processes_killed_stopped_and_resumed(start, tmp_path):
    output = tmp_path / "run"
    assert start.alone(tmp_path / "whole") == 0

    killed = start(output, "--output.profile_steps", "[2, 3]", "--output.profile_rank", "1")
    assert killed.until(lambda: bool(killed.steps) and killed.steps[-1] >= 6), killed.output
    _, other = killed.children()
    began = time.monotonic()
    os.kill(other, signal.SIGKILL)
    assert killed.status() == 1, killed.output
    assert time.monotonic() - began < 60
    assert "error: rank 1 of 2 was ended by SIGKILL; the others are ended too" in killed.output
    assert f"[1] trace of rank 1: {output / 'profile'}\n" in killed.output
    assert {path.name for path in (output / "profile").rglob("*.*")} == {"rank-1.xplane.pb", "rank-1.trace.json.gz"}

    stopped = start(output, "--parallel.fsdp", "2")
    assert stopped.until(lambda: bool(stopped.steps) and stopped.steps[-1] >= 10), stopped.output
    os.kill(stopped.children()[1], signal.SIGTERM)  # to one that is not the first
    assert stopped.status() == 143, stopped.output
    last = max(int(path.name) for path in (output / "checkpoints").iterdir())
    assert [row["message"] for row in rows(output) if row.get("event") == "interrupted"] == [
        f"interrupted by SIGTERM after step {last} of {STEPS}; its state is saved, and --resume goes on"
    ]
    assert start.alone(output) == 0
    found, expected = (np.array([row[:4] for row in figures(f)], np.float64) for f in (output, tmp_path / "whole"))
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE)


@pytest.mark.exhaustive(by="tests/fastjax/cli/test_launch.py::test_a_stopped_process_is_known")
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP], ids=lambda blow: blow.name)
def test_one_of_four_that_dies_or_stands_still_is_named(start, tmp_path, blow):
    sizes = ["--training.per_device_train_batch_size", "1", "--training.max_steps", "100000"]
    limit = ["--training.step_timeout", "20", "--output.save_steps", "null"]
    process = start(tmp_path / "run", *sizes, *limit, count=4)
    assert process.until(lambda: bool(process.steps) and process.steps[-1] >= 6), process.output
    ranks, began = process.children(), time.monotonic()
    os.kill(ranks[2], blow)
    assert process.status() == 1, process.output
    assert time.monotonic() - began < 30
    assert_gone(ranks)
    told = "was ended by SIGKILL; the others are ended" if blow == signal.SIGKILL else "had been stopped by a signal"
    assert f"rank 2 of 4 {told}" in process.output


def test_a_stopped_process_is_known():
    process = subprocess.Popen(["sleep", "60"])
    try:
        assert not launch._is_stopped(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert launch._is_stopped(process.pid) and process.poll() is None
        os.kill(process.pid, signal.SIGCONT)
        assert not launch._is_stopped(process.pid)
    finally:
        process.kill()
        process.wait()


@pytest.mark.exhaustive(
    by="tests/fastjax/cli/test_cli.py::test_one_process_of_several_says_which_and_ends_at_once, "
    "tests/fastjax/parallel/test_processes.py::test_the_first_process_leaves_last_and_others_follow_with_its_status"
)
def test_an_error_of_one_rank_is_told_once_and_ends_all(start, tmp_path, monkeypatch):
    """Within seconds: the others would wait for its gradients, and JAX keep it, waiting for them, five minutes."""
    (tmp_path / "sitecustomize.py").write_text(FAILING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    output = tmp_path / "run"
    failed = start(output)
    assert failed.until(lambda: "ended first" in failed.output), failed.output
    assert failed.status(30) == 1, failed.output
    where = f"rank 1 of 2 on {os.uname().nodename}"
    assert f"\n[1] fastjax train: error: {where}: unexpected KeyError\n[1] Traceback" in failed.output
    assert failed.output.endswith("\nfastjax launch: rank 1 of 2 ended first, with exit status 1\n")
    assert "JaxRuntimeError" not in failed.output and failed.output.count("error:") == 1
    refused = start(output, resume=False)
    assert refused.status() == 2
    told = refused.output[refused.output.index("fastjax train: error:") :].splitlines()
    assert told[0].startswith(
        f"fastjax train: error: rank 0 of 2 on {os.uname().nodename}: output.output_dir: expected"
    )
    assert told[1:] == ["fastjax launch: rank 0 of 2 ended first, with exit status 2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "0", "train"], "-n: expected at least 1 process, got 0"),
        (["-n", "2", "--", "generate"], "launch: expected the command train after the options, got 'generate'"),
        (["-n", "2"], "launch: expected the command train after the options, got none"),
    ],
)
def test_what_cannot_be_launched(capsys, arguments, message):
    assert main(["launch", *arguments]) == 2
    assert capsys.readouterr().err == f"fastjax launch: error: {message}\n"


@pytest.fixture(scope="module")
def whole(start, tmp_path_factory):
    """The folder of a long run of two processes that share the weights, which nothing disturbed."""
    output = tmp_path_factory.mktemp("whole") / "run"
    process = start(output, *LONG)
    assert process.status() == 0, process.output
    return output


@pytest.mark.exhaustive(by=DISTURBED)
@pytest.mark.parametrize("victim", [None, 0, 1], ids=["launch", "rank 0", "rank 1"])
def test_any_process_killed_at_any_moment(start, whole, tmp_path, victim):
    """None of the others stays, and from the newest whole checkpoint it goes on to the bit."""
    draw, output = random.Random(victim), tmp_path / "run"
    for number in range(4):
        process = start(output, *LONG)
        if number == 2:
            until, end = 0, time.monotonic() + draw.uniform(0.0, 8.0)
        else:
            until, end = 50 * number + draw.randint(1, 30), time.monotonic() + 300
        process.until(lambda process=process, until=until, end=end: until in process.steps or time.monotonic() > end)
        time.sleep(draw.uniform(0.0, 0.3))
        ranks = process.children()
        process.kill(victim)
        status = process.status(30)
        assert status == (-signal.SIGKILL if victim is None or victim >= len(ranks) else 1), process.output
        assert_gone(ranks)
    finish(start, output, whole)


@pytest.mark.exhaustive(by=DISTURBED)
def test_a_disk_that_fills_again_and_again(start, whole, tmp_path):
    """At any place of a checkpoint, in the middle and at the end of a run: it goes on without that checkpoint."""
    draw, output = random.Random(0), tmp_path / "run"
    with small_disk(tmp_path / "disk") as (fill, lend):
        process = start(output, *LONG, "--output.save_steps", "2")
        assert process.until(lambda: bool(process.steps)), process.output
        lend(output / "checkpoints")
        saved = process.output.count(" saved\n") + 1
        assert process.until(lambda: process.output.count(" saved\n") > saved), process.output
        for number in range(1, 12):
            fill(draw.randrange(300_000))
            assert process.until(lambda number=number: process.output.count(FULL) >= number, 60), process.output
            fill(None)
            done = process.output.count(" saved\n")
            assert process.until(lambda done=done: process.output.count(" saved\n") > done, 60), process.output
        fill(0)
        process.send(signal.SIGTERM)
        assert process.status(60) == 1
        assert f"fastjax train: error: rank 0 of 2 on {os.uname().nodename}: the checkpoint of step" in process.output
        assert process.output.count(FULL) >= 12 and "JaxRuntimeError" not in process.output
        fill(None)
        finish(start, output, whole)


def finish(start, output, whole):
    last = start(output, *LONG)
    assert last.status() == 0, last.output
    assert "going on after step" in last.output
    assert figures(output) == figures(whole)
    assert result(output / "model") == result(whole / "model")


@contextlib.contextmanager
def small_disk(disk):
    """A disk, and two functions: one leaves so many bytes of it free (None: all that is not used), one lends it."""
    places = []

    def mount(place, *what):
        place.mkdir(exist_ok=True)
        done = subprocess.run(["mount", *what, str(place)], capture_output=True)
        if not done.returncode:
            places.append(place)
        return done.returncode == 0

    def fill(free):
        (disk / "ballast").unlink(missing_ok=True)
        while free is not None:
            found = os.statvfs(disk)
            with open(disk / "ballast", "wb") as file, contextlib.suppress(OSError):  # the run writes, too
                os.posix_fallocate(file.fileno(), 0, max(1, found.f_bavail * found.f_frsize - free))
                break

    def lend(place):
        assert mount(place, "--bind", str(disk))

    try:
        if not mount(disk, "-t", "tmpfs", "-o", "size=16m", "none"):
            pytest.skip("needs the right to mount a disk")
        yield fill, lend
    finally:
        for place in reversed(places):
            subprocess.run(["umount", "--lazy", str(place)], check=True)
