"""`fastjax launch`: a run of two processes that is killed, stopped and resumed is the run of one process."""

import os
import signal
import time

import numpy as np
import pytest
import yaml

from fastjax.cli import main
from tests.support import chat
from tests.support.runs import Process, figures, rows

#: Enough for a kill and a signal in between.
STEPS = 60
#: For the second of two processes: its first checkpoint meets a full disk, its third one a bug.
FAILING = """
import sys, tempfile

def fail(*arguments, dir=None, **options):
    if str(dir).endswith("checkpoints"):
        saves.append(dir)
        if len(saves) == 1:
            raise OSError(28, "No space left on device")
        if len(saves) == 3:
            raise KeyError("a bug of one rank")
    return plain(*arguments, dir=dir, **options)

if sys.orig_argv[-1].endswith(",2,1,1"):
    saves, plain = [], tempfile.TemporaryFile
    tempfile.TemporaryFile = fail
"""
#: float32: a sum over devices is another order of the same terms, which Adam's division carries on.
TOLERANCE = 1e-4


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

    def begin(output, *arguments):
        return Process(["launch", "-n", "2", "--", *train(output), *arguments], folder / "compiled")

    def train(output):
        return ["train", "--config", str(folder / "run.yaml"), "--output.output_dir", str(output), "--resume"]

    def alone(output):
        """In the process of the tests, on one of its devices; returns the exit status."""
        one = ["--training.per_device_train_batch_size", "4", "--parallel.data", "1", "--parallel.fsdp", "1"]
        return main([*train(output), *one])

    begin.alone = alone
    return begin


@pytest.mark.exhaustive(
    by="tests/fastjax/cli/test_launched_result.py::test_the_result_is_gathered_from_both, "
    "tests/fastjax/cli/test_resume.py::test_killed_while_saving, "
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


@pytest.mark.exhaustive(
    by="tests/fastjax/cli/test_launched_result.py::test_the_result_is_gathered_from_both, "
    "tests/fastjax/cli/test_cli.py::test_one_process_of_several_says_which_and_ends_at_once"
)
def test_what_befalls_one_rank_alone(start, tmp_path, monkeypatch):
    """A save that one cannot begin none begins, and all go on; one that is ended by an error ends all, within seconds.

    Without `processes.leave` JAX would keep it, waiting five minutes for the others, which wait for its gradients.
    """
    (tmp_path / "sitecustomize.py").write_text(FAILING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    output = tmp_path / "run"
    failed = start(output, "--output.save_steps", "1")
    assert failed.until(lambda: "a bug of one rank" in failed.output), failed.output
    assert failed.status(30) == 1, failed.output
    where = f"rank 1 of 2 on {os.uname().nodename}"
    assert f"\n[1] fastjax train: error: {where}: unexpected KeyError\n[1] Traceback" in failed.output
    assert "\nfastjax launch: rank 1 of 2 ended first, with exit status 1\n" in failed.output
    assert [(row["step"], row["event"]) for row in rows(output) if row.get("event") in ("save_failed", "saved")] == [
        (1, "save_failed"),
        (2, "saved"),
    ]
    told = f"the checkpoint of step 1 could not be written to {output / 'checkpoints'} by rank 1\n"
    assert f"step 1/{STEPS}: {told}" in failed.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "0", "train"], "-n: expected a number of processes, got 0"),
        (["-n", "2", "--", "generate"], "launch: expected one of the commands train, got ['generate']"),
        (["-n", "2"], "launch: expected one of the commands train, got []"),
    ],
)
def test_what_cannot_be_launched(capsys, arguments, message):
    assert main(["launch", *arguments]) == 2
    assert capsys.readouterr().err == f"fastjax launch: error: {message}\n"
