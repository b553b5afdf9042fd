"""The rows, trackers, trace and report of a run."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from fastjax.parallel.processes import is_primary
from fastjax.runs.context import Run
from fastjax.runs.messages import say
from fastjax.training.metrics import JsonLines, Sink, Tolerant
from fastjax.training.profile import StepProfile
from fastjax.training.progress import make_progress
from fastjax.training.report import describe_environment, describe_peaks, usage_of_run, write_report
from fastjax.training.trackers import make_trackers


class Reporting:
    """Reports of a run outside its loop; only the first process has sinks.

    Attributes:
        sinks: take the rows. The file is the first, so that a tracker that fails cannot keep a row from it.
        status: the end of the run in words.
        peaks: bytes of arrays on each device at most, once the run has ended.
    """

    def __init__(self, run: Run, resume_step: int | None):
        """Open the sinks.

        Args:
            run: the run.
            resume_step: the step to resume from; None: a new run.
        """
        self._run, self.status, self.peaks = run, "failed", list[int]()
        self.sinks: list[Sink] = []
        if not is_primary():
            return
        output, total, console, folder = run.config.output, run.data.total_steps, run.console, run.folder
        name = output.run_name or Path(output.output_dir).name
        file = Tolerant(JsonLines(folder.metrics, resume_step), str(folder.metrics), console)
        trackers = make_trackers(folder.path, name, dataclasses.asdict(run.config), resume_step, console)
        progress = make_progress(total, run.config.training.logging_steps, console)
        self.sinks = [file, *trackers, Tolerant(progress, "the progress", Console(stderr=True)), *run.sinks]

    def tell(self, step: int, event: str, message: str, **more: Any) -> None:
        """Report an event.

        Args:
            step: that it follows.
            event: its kind.
            message: for people.
            more: further fields of the row.
        """
        for sink in self.sinks:
            sink.write({"step": step, "event": event, "message": message, **more})

    def profile(self) -> StepProfile:
        """The trace of this process's steps; of one that is not chosen there is none."""
        output, rank = self._run.config.output, jax.process_index()

        def tell(step: int, message: str) -> None:
            self.tell(step, "profile", message)
            if not is_primary():  # which alone has sinks
                say(Console(stderr=True), message)

        steps = output.profile_steps if rank == output.profile_rank else ()
        return StepProfile(self._run.folder.profile, steps, rank, tell)

    def write(self) -> None:
        """Write the report."""
        run = self._run
        environment = describe_environment(run.step.mesh) | {"gradient checkpointing": run.step.policy}
        if self.peaks:
            each = "device" if jax.process_count() == 1 else "process"
            environment[f"peak memory by {each}"] = describe_peaks(self.peaks)
        model = run.model
        result = usage_of_run(run.config, run.folder.result, model.hf_config, str(model.dtype))
        write_report(
            run.folder.path,
            config=dataclasses.asdict(run.config),
            statistics=run.data.statistics(),
            environment=environment,
            result=result.blocks if self.status == "finished" else [],
            status=self.status,
            console=run.console,
        )
