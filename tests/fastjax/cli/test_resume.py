"""`fastjax train` as a process that is killed, terminated and interrupted: resumed, it is the run that never was."""

import random
import signal

import pytest

from tests.support.kills import STEPS_A_KILL, finish, kill, survive
from tests.support.runs import World, events, figures, result, rows

KILLS = 5


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("world"), KILLS * STEPS_A_KILL).make()


@pytest.fixture(scope="module")
def whole(world):
    """The folder of the run that nothing stopped."""
    output = world.folder / "whole"
    process = world.start(output)
    assert process.status() == 0, process.output
    assert process.steps == list(range(1, world.steps + 1))
    assert 0 < max(row.get("skipped_steps", 0) for row in rows(output)) < 20  # the loss scale matters
    return output


@pytest.mark.exhaustive(
    by="tests/fastjax/cli/test_launched_result.py::test_a_full_disk_and_a_kill_and_the_result_is_gathered_from_both"
)
def test_killed_while_saving(tmp_path):
    """A checkpoint that is not its first is half written: it goes on from the one before."""
    world, output, draw = World(tmp_path, 48).make(), tmp_path / "run", random.Random(0)
    whole = world.start(tmp_path / "whole")
    assert whole.status() == 0, whole.output
    assert max(row.get("skipped_steps", 0) for row in rows(tmp_path / "whole")) > 0  # the loss scale matters
    landed = []
    while not landed or (landed[-1].during != "save" and len(landed) < 4):  # a save may end before its kill
        landed.append(kill(world, output, "save", 17 + 8 * len(landed), draw))
    assert landed[-1].during == "save", landed
    finish(world, tmp_path / "whole", output, landed)
    assert events(output)[-2].startswith("going on after step ")


@pytest.mark.exhaustive(
    by="tests/fastjax/cli/test_launched_result.py::test_a_full_disk_and_a_kill_and_the_result_is_gathered_from_both"
)
def test_killed_at_any_moment(world, whole, tmp_path):
    """More kills and their places: `python -m tests.support.kills`."""
    landed = survive(world, whole, tmp_path / "run", KILLS)
    assert sum(bool(kill.steps) for kill in landed) >= 0.6 * KILLS, landed
    assert sum(kill.during == "save" for kill in landed) >= 0.15 * KILLS, landed


@pytest.mark.exhaustive(
    by="tests/fastjax/cli/test_launched_result.py::test_a_full_disk_and_a_kill_and_the_result_is_gathered_from_both, "
    "tests/fastjax/cli/test_broken_runs.py::test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been"
)
def test_terminated_interrupted_and_ended_at_once(world, whole, tmp_path):
    output = tmp_path / "run"
    for number, status in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        process = world.start(output)
        assert process.until(lambda process=process: len(process.steps) > 10)
        process.send(number)
        assert process.status() == status
        step = process.steps[-1]
        told = (
            f"interrupted by {number.name} after step {step} of {world.steps}; its state is saved, and --resume goes on"
        )
        assert events(output)[-1] == told
        assert process.output.splitlines()[-1] == f"fastjax train: {told}"
        assert max(int(path.name) for path in (output / "checkpoints").iterdir()) == step
    report = (output / "report.html").stat().st_mtime_ns
    process = world.start(output)
    assert process.until(lambda: len(process.steps) > 10)
    process.send(signal.SIGINT)
    assert process.until(lambda: "SIGINT: finishing the step and saving; Ctrl-C again ends at once" in process.output)
    process.send(signal.SIGINT)
    assert process.status() == 130
    assert (output / "report.html").stat().st_mtime_ns == report  # which any other end writes
    assert events(output)[-1].startswith(f"going on after step {step}, from ")
    process = world.start(output)
    assert process.status() == 0, process.output
    assert result(output / "adapter") == result(whole / "adapter")
    assert figures(output) == figures(whole)
