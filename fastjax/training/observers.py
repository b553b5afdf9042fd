"""The observers of a run's loop: its rows of metrics, what is checked in them, evaluation, checkpoints, the end.

Their order in `fit` is the order of the actions after a step: a trace ends, signals are looked at, the held-out rows
are evaluated, the state is saved.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fastjax.data.batches import Batch
from fastjax.errors import TrainingError
from fastjax.training.checkpoint import Checkpoints, SaveFailed
from fastjax.training.loop import Loop, Observer, Step
from fastjax.training.metrics import Evaluation, Row, Sink, Throughput
from fastjax.training.step import COUNTS, STEP_METRICS

#: Said where no state before a step that is not finite was saved.
NOTHING_KEPT = "nothing was saved"


class SinkWriter(Observer):
    """Hands the rows on: to the file, the trackers, the screen and a program's own sinks."""

    def __init__(self, sinks: Sequence[Sink], ended: Callable[[], bool] = lambda: False):
        """Take the sinks.

        Args:
            sinks: in order.
            ended: whether one of them wants the run to end.
        """
        self._sinks, self.ends = sinks, ended

    def write(self, row: Row) -> None:
        """Hand a row on."""
        for sink in self._sinks:
            sink.write(row)


class Startup(NamedTuple):
    """Seconds before the first step.

    Attributes:
        load_seconds: to load the model.
        compile_seconds: to compile the step, where it was compiled before its first call.
        overlap_seconds: of both, where they went on at once.
    """

    load_seconds: float
    compile_seconds: float = 0.0
    overlap_seconds: float = 0.0


class Metrics(Observer):
    """Makes a row of each step, and reports once how long the start has taken."""

    def __init__(self, throughput: Throughput, startup: Startup | None = None):
        """Take the measure of the speed.

        Args:
            throughput: of the run.
            startup: what came before the first step; None: the start is not reported.
        """
        self._throughput, self._startup = throughput, startup
        self._called: float | None = None

    def waits(self, what: str | None, usual: float | None = None) -> None:
        """Leave what may take any time out of the speed."""
        if what is None:
            self._throughput.pause()

    def before(self, loop: Loop) -> None:
        """Leave compiling for another length of rows out of the speed."""
        if loop.new_length is not None and self._called is not None:
            self._throughput.pause()
        self._called, self._first = time.perf_counter(), self._called is None

    def called(self, loop: Loop) -> None:
        """Report the seconds of compiling for another length of rows; those of the first are part of the start."""
        if loop.new_length is not None and not self._first:
            assert self._called is not None, "`before` comes before"
            seconds, length = time.perf_counter() - self._called, loop.new_length
            message = f"the train step for rows of {length:,} tokens compiled in {seconds:.1f} s"
            loop.event("compiled", message, compile_seconds=seconds, row_length=length)

    def measured(self, loop: Loop, step: Step) -> None:
        """Report the step's row."""
        row = _row(step) | self._throughput.step(step.number, step.num_tokens)
        if not step.finite and not step.lost:
            row["skipped"] = True
        loop.progress = loop.progress._replace(seconds=float(row["seconds"] or 0.0))
        loop.write(row)
        if self._startup is not None:
            self._tell_start(loop, step, self._startup)
            self._startup = None

    def _tell_start(self, loop: Loop, first: Step, startup: Startup) -> None:
        """Report the seconds until the end of the first step, whose numbers have just been read."""
        load, compiled, overlap = startup
        compiled += first.returned - first.called
        stepped = time.perf_counter() - first.returned
        message = (
            f"started: the model loaded in {load:.1f} s, the train step for rows of {first.batch.tokens.shape[-1]:,} "
            f"tokens compiled in {compiled:.1f} s"
            f"{f', {overlap:.1f} s of them at once,' if overlap >= 0.05 else ''} and taken for the first time in "
            f"{stepped:.1f} s"
        )
        seconds = {"load_seconds": load, "compile_seconds": compiled, "overlap_seconds": overlap}
        loop.event("started", message, first.number, **seconds, first_step_seconds=stepped)


class Evaluating(Observer):
    """Evaluates on the held-out rows when it is time, and tells where a run ends early."""

    def __init__(self, evaluate: Callable[[Any], Evaluation]):
        """Take the evaluation.

        Args:
            evaluate: of the trainable arrays.
        """
        self._evaluate = evaluate

    def after(self, loop: Loop) -> None:
        """Evaluate, and judge the result."""
        if loop.actions.evaluate:
            loop.waits(f"the evaluation after step {loop.progress.step}")
            evaluation = self._evaluate(loop.state.trainable)  # behind the step, for which nothing waits yet
            loop.waits(None)
            loop.read()
            loop.write(evaluation.row(loop.progress.step))
            loop.waits(None)
            loop.judge(evaluation)
        if loop.actions.stop == "patience":
            progress = loop.progress
            best = f"{progress.best_loss:.4f} at step {progress.best_step}"
            told = f"no better held-out loss than {best} in {progress.evaluations_since_best} evaluations"
            loop.event("early_stop", f"{told}: the run ends early")


class Saving(Observer):
    """Saves the state when it is time, in the background; a failed periodic save is reported and ends nothing."""

    def __init__(self, checkpoints: Checkpoints, step: int):
        """Take the checkpoints.

        Args:
            checkpoints: take the state.
            step: that the run begins with, of which there is a whole checkpoint; 0: there is none.
        """
        self._checkpoints = checkpoints
        self._saved_step = step or None  # this step has a whole checkpoint
        self._saving_step: int | None = None  # the last one of which a save was begun

    def called(self, loop: Loop) -> None:
        """Write, while the device is at work."""
        self._checkpoints.begin()

    def after(self, loop: Loop) -> None:
        """Save, and report an ended save."""
        actions = loop.actions
        if actions.log:
            loop.read()
        if actions.save:
            self._save(loop, final=actions.stop == "signal")
        self._report(loop, self._checkpoints.poll)

    def over(self, loop: Loop) -> None:
        """Wait for the last save."""
        self._settle(loop)

    def keep(self, loop: Loop, step: int) -> str:
        """Save the state before a step that is not finite.

        Args:
            loop: whose state is halted.
            step: that it is the state after.

        Returns:
            The kept checkpoint, in words.
        """
        if step == 0:
            return NOTHING_KEPT
        self._settle(loop)
        loop.waits(f"the checkpoint of step {step}")
        try:
            if self._saved_step != step:
                good = loop.state._replace(halted=jnp.zeros((), bool))
                self._checkpoints.save(good, loop.progress._replace(step=step))
                self._checkpoints.wait()
        except SaveFailed as error:
            return str(error)
        return f"the state before it is the checkpoint of step {step}"

    def _save(self, loop: Loop, *, final: bool) -> None:
        self._settle(loop)  # an earlier failed save does not prevent this one
        loop.waits(f"the checkpoint of step {loop.progress.step}")
        self._saving_step = loop.progress.step
        try:
            self._checkpoints.save(loop.state, loop.progress)
            if final:
                self._saved(loop, self._checkpoints.wait())
        except SaveFailed as error:
            if final:
                raise
            loop.event("save_failed", str(error))

    def _settle(self, loop: Loop) -> None:
        """Wait for the current save, and report its outcome."""
        if self._saving_step is not None:
            loop.waits(f"the checkpoint of step {self._saving_step}")
        self._report(loop, self._checkpoints.wait)

    def _report(self, loop: Loop, ended: Callable[[], int | None]) -> None:
        try:
            self._saved(loop, ended())
        except SaveFailed as error:
            loop.event("save_failed", str(error))

    def _saved(self, loop: Loop, step: int | None) -> None:
        if step is not None:
            self._saved_step = step
            loop.event("saved", f"checkpoint of step {step} saved", step)


class Finite(Observer):
    """Ends the run at a step that is not finite, with the state before it saved."""

    def __init__(self, saving: Saving | None, explain: Callable[[Any, Batch, int], str] | None = None):
        """Take what it needs then.

        Args:
            saving: of the run; None: nothing is saved.
            explain: (state, batch, step) → the rows that broke the step.
        """
        self._saving, self._explain = saving, explain

    def measured(self, loop: Loop, step: Step) -> None:
        """Look at a step.

        Raises:
            TrainingError: it is not finite.
        """
        if not step.lost:
            return
        saved = NOTHING_KEPT if self._saving is None else self._saving.keep(loop, step.number - 1)
        loop.waits(None)  # the rows are looked at one by one
        rows = "" if self._explain is None else f" {self._explain(loop.state, step.batch, step.number)}"
        way_out = "Look at these rows, or try a lower optimizer.learning_rate"
        loss, norm = float(step.values["loss"]), float(step.values["grad_norm"])
        if "loss_scale" in step.values and not np.isfinite(loss):
            way_out = (
                "The forward pass overflows in float16: set model.dtype to bfloat16 or float32, or look at these rows"
            )
        message = (
            f"step {step.number}: the loss is {loss} and the gradient norm {norm}; expected finite numbers. The "
            f"weights are as they were before the step; {saved}.{rows} {way_out}"
        )
        loop.event("not_finite", message, step.number)
        raise TrainingError(message)


def _row(step: Step) -> dict[str, Any]:
    """The row of a train step from its numbers."""
    values = step.values
    row: dict[str, Any] = {
        "step": step.number,
        "loss": float(values["loss"]),
        "grad_norm": float(values["grad_norm"]),
        "learning_rate": float(values.get("learning_rate", np.nan)),
    }
    if "num_targets" in values:
        num_targets, num_correct = (int(values[name]) for name in COUNTS)
        row |= {"token_accuracy": num_correct / max(1, num_targets), "num_targets": num_targets}
    row |= {name: float(value) for name, value in values.items() if name not in (*COUNTS, *STEP_METRICS)}
    if "loss_scale" in values:
        row |= {"loss_scale": float(values["loss_scale"]), "skipped_steps": int(values["skipped_steps"])}
    return row
