"""A run that is killed again and again and resumed each time, against one that is not.

python -m tests.support.kills --kills 20
"""

import argparse
import collections
import random
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support.runs import Process, World, figures, result

#: Enough for a checkpoint between two kills.
STEPS_A_KILL = 30


class Kill(NamedTuple):
    """Where a kill landed.

    Attributes:
        meant: the awaited moment: "start", any up to the first step; "step", any after some; "save"; or "export".
        steps: numbers of the steps that the process had reported.
        during: "start", "steps", "save" or "export", by the process's unfinished files.
    """

    meant: str
    steps: list[int]
    during: str


def moments(kills: int, draw: random.Random) -> list[str]:
    """A tenth of the kills up to the first step, a third in saves; the last seventh while the result is written."""
    start, save, export = max(1, kills // 10), -(-kills // 3), max(1, kills // 7)
    before = ["start"] * start + ["save"] * save + ["step"] * (kills - start - save - export)
    draw.shuffle(before)
    return before + ["export"] * export


def survive(world: World, whole: Path, output: Path, kills: int, seed: int = 0) -> list[Kill]:
    """Kill a run `kills` times, and resume it to the end.

    Args:
        world: its files.
        whole: folder of the uninterrupted run.
        output: folder of the killed run.
        kills: number of kills.
        seed: of the moments.

    Returns:
        Where the kills landed.

    Raises:
        AssertionError: the runs' results or figures differ, or unfinished files remain.
    """
    draw = random.Random(seed)
    landed = [
        kill(world, output, moment, number * STEPS_A_KILL + draw.randint(1, STEPS_A_KILL // 2), draw)
        for number, moment in enumerate(moments(kills, draw))
    ]
    finish(world, whole, output, landed)
    return landed


def finish(world: World, whole: Path, output: Path, landed: Sequence[Kill]) -> None:
    """Resume a killed run to the end, and compare it with the uninterrupted one.

    Raises:
        AssertionError: results or figures differ, or unfinished files remain.
    """
    last = world.start(output)
    assert last.status() == 0, last.output
    assert _unfinished(output) == ("", ""), f"unfinished at the end: {_unfinished(output)}; {landed}"
    assert result(output / "adapter") == result(whole / "adapter"), f"another adapter; {landed}"
    assert figures(output) == figures(whole), f"other figures; {landed}"


def kill(world: World, output: Path, moment: str, step: int, draw: random.Random) -> Kill:
    """Kill a process at a moment; a moment after its first step comes after that step of the run."""
    process = world.start(output)
    if moment == "start":
        end = time.monotonic() + draw.uniform(0.0, 3.0)
        process.until(lambda: bool(process.steps) or time.monotonic() > end)
    elif moment == "step":
        process.until(lambda: _taken(process, step))
        time.sleep(draw.uniform(0.0, 0.05))
    elif moment == "save":
        process.until(lambda: _taken(process, step) and bool(_unfinished(output)[0]))
    else:
        process.until(lambda: _begun(process) and bool(_unfinished(output)[1]))
    process.send(signal.SIGKILL)
    assert process.status() == -signal.SIGKILL, f"it ended before it was killed:\n{process.output}"
    save, export = _unfinished(output) if _begun(process) else ("", "")
    during = "export" if export else "save" if save else "steps" if process.steps else "start"
    return Kill(moment, process.steps, during)


def _taken(process: Process, step: int) -> bool:
    return bool(process.steps) and process.steps[-1] >= step


def _begun(process: Process) -> bool:
    """Whether it has removed earlier processes' unfinished files; later ones are its own."""
    return "going on after step" in process.output or "no checkpoint to go on from" in process.output


def _unfinished(output: Path) -> tuple[str, str]:
    """Names of an unfinished checkpoint and an unfinished result; empty if there are none."""
    found = [path.name for folder in (output, output / "checkpoints") if folder.is_dir() for path in folder.iterdir()]
    checkpoints = [name for name in found if name.endswith(".unfinished")]
    return next(iter(checkpoints), ""), next((name for name in found if name.endswith(".partial")), "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        world = World(Path(folder), arguments.kills * STEPS_A_KILL).make()
        whole = world.start(Path(folder) / "whole")
        assert whole.status() == 0, whole.output
        landed = survive(world, Path(folder) / "whole", Path(folder) / "killed", arguments.kills, arguments.seed)
        for number, kill in enumerate(landed, 1):
            taken = f"steps {kill.steps[0]} to {kill.steps[-1]}" if kill.steps else "no step"
            print(f"{number:3} meant: {kill.meant:6}  landed: {kill.during:6}  after {taken}")
        counts = collections.Counter(kill.during for kill in landed)
        print(f"{len(landed)} kills, {dict(counts)}, in {world.steps} steps and {time.monotonic() - begin:.0f} s:")
        print("the adapter, byte for byte, and all figures are those of the run that was not killed")


if __name__ == "__main__":
    main()
