"""A step that does not end ends its process, which says what it waited for and where it stands."""

import subprocess
import sys

import pytest

CODE = """
import pathlib, sys, time
from fastjax.training.watchdog import Watchdog

def stuck():
    time.sleep(60)

with Watchdog(0.4, pathlib.Path(sys.argv[1]), 3, "rank 3 of 4 on node") as dog:
    for step in range(4):
        dog.watch(f"the numbers of step {step}")
        time.sleep(0.2)
    dog.watch(None)
    time.sleep(0.8)
    dog.watch("the numbers of step 7")
    stuck()
"""


@pytest.mark.one_world
def test_it_names_the_step_and_shows_the_stacks(tmp_path):
    done = subprocess.run([sys.executable, "-c", CODE, str(tmp_path)], capture_output=True, text=True, timeout=60)
    file = tmp_path / "stacks-3.txt"
    assert done.returncode == 1
    assert (
        f"fastjax: error: rank 3 of 4 on node: waited 0.4 s (training.step_timeout) for the numbers of step 7; the "
        f"stacks of its threads follow, and are in {file}\n" in done.stderr
    )
    assert "in stuck\n" in done.stderr and "in stuck\n" in file.read_text()
