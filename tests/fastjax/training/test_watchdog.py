"""A step, evaluation or save that does not end ends its process, which says what it waited for and where it stands."""

import re
import subprocess
import sys

CODE = """
import pathlib, sys, time
from fastjax.training.watchdog import Watchdog

def stuck():
    time.sleep(60)

with Watchdog(0.4, pathlib.Path(sys.argv[1]), 3, "rank 3 of 4 on node") as dog:
    for step in range(4):
        dog.waits(f"the numbers of step {step}")
        time.sleep(0.2)
    dog.waits("the evaluation after step 4")
    for batch in range(4):
        time.sleep(0.2)
        dog.restart()
    dog.waits(None)
    dog.restart()
    time.sleep(0.8)
    dog.waits("the numbers of step 7")
    stuck()
"""

#: The loop with a part that does not end, each in a process of its own.
STALLED = """
import os, pathlib, sys, time, types
import jax
import numpy as np
from fastjax.data.batches import Batch
from fastjax.training.cadence import Cadence
from fastjax.training import watchdog
from fastjax.training.loop import LoopState, fit, sent_ahead
from fastjax.training.metrics import Throughput
from fastjax.training.observers import Evaluating, Metrics, Saving
from fastjax.training.watchdog import Watchdog

class Late:
    def __array__(self, *arguments, **options):
        stuck()

def step(state, batch):
    calls.append(1)
    names = "loss", "grad_norm", "squared_norms", "finite", "learning_rate"
    return state, dict.fromkeys(names, Late() if name == "numbers" and len(calls) == 3 else np.float32(1))

def stuck(*arguments):
    time.sleep(60)

saves = types.SimpleNamespace(begin=lambda: None, save=stuck, wait=lambda: None, poll=lambda: None, close=lambda: None)
stalled = {"evaluation": (Cadence(4, True, evaluate=2), Evaluating(stuck))}
stalled["save"] = (Cadence(4, save=2), Saving(saves, 0))
stalled["numbers"] = (Cadence(4),)
watchdog.FLOOR = 0.5
state, batch = types.SimpleNamespace(trainable=None), Batch(*[np.zeros((1, 1, 1), np.int32)] * 4)
for name, (cadence, *others) in stalled.items():
    if (child := os.fork()) == 0:
        jax.local_devices()  # not while it is watched
        calls, timeout = [], 30 if name == "numbers" else 0.5
        with Watchdog(timeout, pathlib.Path(sys.argv[1]), 0) as dog:
            with sent_ahead([batch] * 4) as ready:
                fit(step, LoopState(state), ready, cadence, [Metrics(Throughput(4)), dog, *others])
    print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_it_names_the_step_and_shows_the_stacks(tmp_path):
    done = subprocess.run([sys.executable, "-c", CODE, str(tmp_path)], capture_output=True, text=True, timeout=60)
    file = tmp_path / "stacks-3.txt"
    assert done.returncode == 1
    waited = "rank 3 of 4 on node: waited 0.4 s (training.step_timeout) for the numbers of step 7"
    assert f"fastjax: error: {waited}; the stacks of its threads follow, and are in {file}\n" in done.stderr
    assert "in stuck\n" in done.stderr and "in stuck\n" in file.read_text()
    assert file.read_text().startswith(f"{waited}\n")


def test_what_does_not_end_is_named(tmp_path):
    done = subprocess.run([sys.executable, "-c", STALLED, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.stdout == "evaluation 1\nsave 1\nnumbers 1\n", done.stderr
    for what in ("the evaluation after step 2", "the checkpoint of step 2"):
        assert f"fastjax: error: waited 0.5 s (training.step_timeout) for {what}; the stacks" in done.stderr
    # An hour for what has not come yet; of a step the others' own time says more.
    assert re.search(
        r"error: waited 0\.\d+ s \(the last took [\d.e-]+ s at most\) for the numbers of step 3;", done.stderr
    )
    assert done.stderr.count("in stuck\n") == 3
