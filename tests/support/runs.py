"""Training runs from files to files: their settings, their results, and `fastjax train` as a process."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import yaml

from fastjax.training.config import (
    DataSection,
    LoraSection,
    ModelSection,
    OptimizerConfig,
    OutputSection,
    ParallelSection,
    PreferencesSection,
    TrainConfig,
    TrainingSection,
)
from tests.support import chat

ROOT = Path(__file__).resolve().parents[2]
#: The section `parallel` of a run that leaves the other fake devices alone.
ONE_DEVICE = {"data": 1, "fsdp": 1}
#: A step's line, not an event's.
STEP = re.compile(r"step (\d+)/\d+: (loss|skipped)")


def config(**sections) -> TrainConfig:
    """The settings of a run that is not started, by section."""
    base = {"model": {"model_name": "m"}, "data": {"train": "d"}, "output": {"output_dir": "o"}, "parallel": ONE_DEVICE}
    kinds = {
        "model": ModelSection,
        "data": DataSection,
        "output": OutputSection,
        "lora": LoraSection,
        "optimizer": OptimizerConfig,
        "training": TrainingSection,
        "parallel": ParallelSection,
        "preferences": PreferencesSection,
    }
    made = {name: kinds[name](**(base.get(name, {}) | sections.get(name, {}))) for name in kinds}
    return TrainConfig(**made)


def rows(folder: Path) -> list[dict]:
    """The rows of the metrics."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def metrics(folder: Path | str) -> list[dict]:
    """The rows of steps and evaluations."""
    return [row for row in rows(Path(folder)) if "event" not in row]


def events(folder: Path) -> list[str]:
    """Messages of the events other than saves."""
    return [row["message"] for row in rows(folder) if row.get("event") not in (None, "started", "saved")]


def figures(folder: Path) -> list[list]:
    """The figures shared by equal runs."""
    names = ("step", "loss", "grad_norm", "learning_rate", "eval_loss", "loss_scale", "skipped_steps")
    return [[row.get(name) for name in names] for row in rows(folder) if "event" not in row]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def result(folder: Path) -> dict[str, bytes]:
    """Every file of a run's result but its model card, which tells how fast the run was."""
    found = contents(folder)
    del found["README.md"]
    return found


class World(NamedTuple):
    """The shared files of a test's processes.

    Attributes:
        folder: of model, data, settings, and the cache of compiled programs.
        steps: of a run.
    """

    folder: Path
    steps: int

    def make(self) -> "World":
        """Write the files of a run that depends on every part of a checkpoint and saves while it runs."""
        content = {
            "model": {
                "model_name": str(chat.write_model(self.folder / "model")),
                "max_seq_length": 48,
                "dtype": "float16",
                "load_in_4bit": False,
            },
            "data": {"train": str(chat.write_chats(self.folder / "chats.jsonl")), "cache_dir": None},
            "lora": {"r": 4, "lora_dropout": 0.2, "target_modules": ["q_proj", "down_proj"]},
            "optimizer": {"name": "adamw_8bit", "learning_rate": 0.01, "warmup_steps": 4},
            "training": {
                "max_steps": self.steps,
                "neftune_noise_alpha": 5.0,
                "initial_loss_scale": 2.0**24,
                "loss_scale_window": 20,
                "logging_steps": 1,
            },
            "output": {"output_dir": "given on the command line", "save_steps": 8},
        }
        (self.folder / "run.yaml").write_text(yaml.safe_dump(content))
        return self

    def start(self, output: Path) -> "Process":
        """`fastjax train --resume`, which starts anew without a checkpoint."""
        return Process(
            ["train", "--config", str(self.folder / "run.yaml"), "--output.output_dir", str(output), "--resume"],
            self.folder / "compiled",
        )


def assert_gone(processes: list[int], seconds: float = 10.0) -> None:
    """Wait until processes have ended, so many seconds at most."""
    from fastjax.parallel.processes import lives  # which imports JAX

    end = time.monotonic() + seconds
    while left := [one for one in processes if lives(one)]:
        assert time.monotonic() < end, f"still there: {left}"
        time.sleep(0.01)


def environment(compiled: Path) -> dict[str, str]:
    """The variables of a process of its own: one device, quick compilation, and a folder of compiled programs."""
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join(flags),
        "JAX_COMPILATION_CACHE_DIR": str(compiled),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "PYTHONUNBUFFERED": "1",
    }


class Process:
    """The command `fastjax` in a process of its own.

    Attributes:
        output: its output so far.
        steps: numbers of the reported steps.
    """

    def __init__(self, arguments: list[str], compiled: Path):
        self.output, self.steps = "", []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fastjax", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(compiled),
            cwd=ROOT,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self.output += line
                if found := STEP.match(line):
                    self.steps.append(int(found[1]))

    def until(self, happened: Callable[[], bool], seconds: float = 300.0) -> bool:
        """Wait for an event; returns whether it came while the process was alive."""
        end = time.monotonic() + seconds
        while self._process.poll() is None:
            if happened():
                return True
            if time.monotonic() > end:
                self.send(signal.SIGKILL)
                raise TimeoutError(f"not in {seconds} seconds:\n{self.output}")
            time.sleep(0.0005)
        return False

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def children(self) -> list[int]:
        """Ids of the processes that it has started, in their order."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        return sorted(map(int, children.read_text().split()))

    def kill(self, victim: int | None) -> None:
        """End the process by SIGKILL, or the one of that place among its children, where there is."""
        children = self.children()
        if victim is not None and victim < len(children):
            os.kill(children[victim], signal.SIGKILL)
        else:
            self.send(signal.SIGKILL)

    def status(self, seconds: float = 300.0) -> int:
        """Wait for the end: the exit status, or less than zero, a signal's number."""
        status = self._process.wait(seconds)
        self._reader.join()
        return status
