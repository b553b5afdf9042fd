"""The loop around the pure train step: batches in, rows of numbers out, checkpoints on the way.

The loop is impure and thin: `cadence` decides, the loop executes. It dispatches step n + 1 before it reads the numbers
of step n, so the device never waits for the host: JAX returns from a call before the device is done, and only reading
a number blocks. A step that is not finite halts the state on the device, so that one dispatched after it changes
nothing. A thread makes batches and sends them to the device.
"""

import collections
import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fastjax.data.batches import Batch
from fastjax.data.prefetch import prefetched
from fastjax.errors import TrainingError
from fastjax.training.cadence import Cadence, Progress
from fastjax.training.checkpoint import Checkpoints, SaveFailed
from fastjax.training.health import GradientCheck
from fastjax.training.loss import LossSums, Mean
from fastjax.training.metrics import Evaluation, Row, Sink, Throughput
from fastjax.training.profile import StepProfile
from fastjax.training.signals import SharedStop, StopSignals
from fastjax.training.step import COUNTS, STEP_METRICS

TrainStep = Callable[[Any, Any, Batch], tuple[Any, dict[str, jax.Array]]]
EvalStep = Callable[[Any, Any, Batch], LossSums]

#: Batches queued on the device.
PREFETCH = 2
#: Batches of an evaluation that devices may have before them.
AHEAD = 8
#: Steps whose time tells how long the next may take.
_LAST_STEPS = 16

_START = Progress()
_NEVER = Cadence()


class Fitted(NamedTuple):
    """The end of the loop.

    Attributes:
        state: after the last step.
        progress: of the run.
        evaluation: the last one; None: there was none.
        complete: whether the run is over, by its last step or by early stopping; False: a signal has stopped it.
    """

    state: Any
    progress: Progress
    evaluation: Evaluation | None
    complete: bool


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


class _Pending(NamedTuple):
    """A dispatched step with unread numbers, and when its call began and returned."""

    step: int
    num_tokens: int
    batch: Batch
    metrics: dict[str, jax.Array]
    called: float
    returned: float


def fit(
    train_step: TrainStep,
    state: Any,
    frozen: Any,
    batches: Iterable[Batch],
    *,
    learning_rates: np.ndarray,
    start: Progress = _START,
    cadence: Cadence = _NEVER,
    sinks: Sequence[Sink] = (),
    throughput: Throughput | None = None,
    startup: Startup | None = None,
    evaluate: Callable[[Any], Evaluation] | None = None,
    checkpoints: Checkpoints | None = None,
    stop: StopSignals | SharedStop | None = None,
    check: GradientCheck | None = None,
    explain: Callable[[Any, Batch, int], str] | None = None,
    send: Callable[[Batch], Batch] = jax.device_put,
    watch: Callable[..., None] = lambda what, usual=None: None,
    profile: StepProfile | None = None,
    ended: Callable[[], bool] = lambda: False,
) -> Fitted:
    """Take steps until there is one for each learning rate.

    Args:
        train_step: `make_train_step`'s function: (state, frozen, batch) → (state, metrics).
        state: the TrainState to start from; it is donated.
        frozen: the frozen weights.
        batches: of the steps after `start.step`, at least as many as steps remain.
        learning_rates: float32 [steps of the whole run], by the number of updates made before.
        start: the progress so far.
        cadence: when to evaluate, to save, to end early.
        sinks: take the rows, in order.
        throughput: measures the run; None: one that knows the number of steps only.
        startup: what came before, for the event of the start; None: there is no such event.
        evaluate: the held-out evaluation of a trainable tree; None: there is none.
        checkpoints: take the state; None: nothing is saved.
        stop: the signal that ends the run; the step is finished and, with checkpoints, the state saved.
        check: judges the first gradients.
        explain: (state, batch, step) → the rows that broke the step.
        send: puts a batch on the devices.
        watch: (what, usual) is told what the loop waits for, None: for something that may take any time; and of the
            numbers of a step the seconds that the slowest of the last steps has taken.
        profile: traces some of the steps; None: none.
        ended: whether the run is to end before its last step; asked before each.

    Returns:
        The end of the loop.

    Raises:
        TrainingError: a step whose loss or gradient is not finite, weights without gradient, too few batches, or a
            state that cannot be saved when the run is stopped.
    """
    return _Loop(learning_rates, start, cadence, sinks, throughput, startup, checkpoints, check, explain, watch).run(
        train_step, state, frozen, batches, evaluate, stop or StopSignals(), send, profile, ended
    )


class _Loop:
    """The impure part of `fit`: the progress so far, and the execution of the cadence's actions."""

    def __init__(self, learning_rates, start, cadence, sinks, throughput, startup, checkpoints, check, explain, watch):
        self.rates, self.total = learning_rates, len(learning_rates)
        self.progress, self.cadence, self.sinks = start, cadence, sinks
        self.throughput = throughput or Throughput(self.total)
        self.startup = startup
        self.checkpoints, self.check, self.explain, self.watch = checkpoints, check, explain, watch
        self.pending: _Pending | None = None
        self.took: collections.deque[float] = collections.deque(maxlen=_LAST_STEPS)
        self.saved_step = start.step or None  # this step has a whole checkpoint
        self.saving_step: int | None = None  # the last one of which a save was begun

    def run(self, train_step, state, frozen, batches, evaluate, stop, send, profile, ended) -> Fitted:
        cadence, evaluation = self.cadence, None
        with contextlib.closing(prefetched(iter(batches), PREFETCH, transform=functools.partial(_sent, send))) as ready:
            while self.progress.step < self.total and not cadence.exhausted(self.progress) and not ended():
                self.watch(f"the batch of step {self.progress.step + 1}, from the data")
                if (item := next(ready, None)) is None:
                    raise TrainingError(
                        f"the data ended after {self.progress.step} steps; expected batches for {self.total}"
                    )
                num_tokens, batch = item
                if profile is not None and profile.begins_with(self.progress.step + 1):
                    self.report(state)  # the step ahead is over: the trace has whole steps
                    self.watch(None)
                    profile.start(self.progress.step + 1)
                called = time.perf_counter()
                self.watch(f"the call of step {self.progress.step + 1}")
                with jax.profiler.StepTraceAnnotation("train", step_num=self.progress.step + 1):
                    state, metrics = train_step(state, frozen, batch)
                returned = time.perf_counter()
                if self.checkpoints is not None:
                    self.checkpoints.begin()  # while the device is at work
                self.report(state)
                stop.sync()
                step = self.progress.step + 1
                self.pending, self.progress = (
                    _Pending(step, num_tokens, batch, metrics, called, returned),
                    self.progress._replace(step=step),
                )
                if profile is not None and profile.ends_with(step):
                    self.report(state)
                    self.watch(None)
                    profile.stop(step)
                    self.throughput.pause()
                asked = {"held_out": evaluate is not None, "signalled": stop.received is not None}
                actions = cadence.after(self.progress, self.total, **asked)
                if actions.evaluate and evaluate is not None:
                    self.watch(f"the evaluation after step {step}")
                    evaluation = evaluate(state.trainable)  # behind the step, for which nothing waits yet
                    self.watch(None)
                    self.throughput.pause()
                    self.report(state)
                    self.judge(evaluation)
                    actions = cadence.after(self.progress, self.total, evaluated=True, **asked)
                if actions.stop == "patience":
                    self.tell_early_stop()
                if actions.log:
                    self.report(state)
                if actions.save:
                    self.save(state, final=actions.stop == "signal")
                self.poll()
                if actions.stop == "signal":
                    self.watch(None)
                    return Fitted(state, self.progress, evaluation, complete=False)
        self.report(state)  # of a run that was ended
        self.settle()
        self.watch(None)
        return Fitted(state, self.progress, evaluation, complete=True)

    def write(self, row: Row) -> None:
        for sink in self.sinks:
            sink.write(row)

    def event(self, kind: str, message: str, step: int | None = None) -> None:
        self.write({"step": self.progress.step if step is None else step, "event": kind, "message": message})

    def report(self, state: Any) -> None:
        """Read the pending step's numbers and hand them on."""
        if self.pending is None:
            return
        pending, self.pending = self.pending, None
        self.watch(f"the numbers of step {pending.step}", max(self.took, default=None))
        values = jax.device_get(pending.metrics)
        self.took.append(time.perf_counter() - pending.called)
        rate = float(self.rates[min(int(values["updates"]), self.total - 1)])
        row = _row(pending.step, values, rate) | self.throughput.step(pending.step, pending.num_tokens)
        finite, scaled = bool(values["finite"]), float(values.get("loss_scale", 0.0)) > 1
        lost = not (scaled and np.isfinite(values["loss"]))
        if not finite and not lost:
            row["skipped"] = True
        self.progress = self.progress._replace(seconds=float(row["seconds"] or 0.0))
        self.write(row)
        self.tell_start(pending)
        if not finite and lost:
            self.fail(state, pending, row)
        if finite and self.check is not None:
            self.check.step(values["squared_norms"], rate, last=pending.step == self.total)

    def tell_start(self, first: _Pending) -> None:
        """Report the seconds until the end of the first step, whose numbers have just been read."""
        if self.startup is None:
            return
        compiled = self.startup.compile_seconds + first.returned - first.called
        stepped = time.perf_counter() - first.returned
        load, overlap = self.startup.load_seconds, self.startup.overlap_seconds
        self.startup = None
        message = (
            f"started: the model loaded in {load:.1f} s, the train step compiled in {compiled:.1f} s"
            f"{f', {overlap:.1f} s of them at once,' if overlap >= 0.05 else ''} and taken for the first time in "
            f"{stepped:.1f} s"
        )
        seconds = {
            "load_seconds": load,
            "compile_seconds": compiled,
            "overlap_seconds": overlap,
            "first_step_seconds": stepped,
        }
        self.write({"step": first.step, "event": "started", "message": message, **seconds})

    def fail(self, state: Any, pending: _Pending, row: Row) -> None:
        """Save the state before a step that is not finite, and raise."""
        good = self.progress._replace(step=pending.step - 1)
        kept = "nothing was saved"
        if self.checkpoints is not None and good.step > 0:
            self.settle()
            self.watch(f"the checkpoint of step {good.step}")
            try:
                if self.saved_step != good.step:
                    self.checkpoints.save(state._replace(halted=jnp.zeros((), bool)), good)
                    self.checkpoints.wait()
                kept = f"the state before it is the checkpoint of step {good.step}"
            except SaveFailed as error:
                kept = str(error)
        self.watch(None)  # the rows are looked at one by one
        rows = "" if self.explain is None else f" {self.explain(state, pending.batch, pending.step)}"
        way_out = "Look at these rows, or try a lower optimizer.learning_rate"
        if "loss_scale" in row and not np.isfinite(row["loss"]):
            way_out = (
                "The forward pass overflows in float16: set model.dtype to bfloat16 or float32, or look at these rows"
            )
        message = (
            f"step {pending.step}: the loss is {row['loss']} and the gradient norm {row['grad_norm']}; expected finite "
            f"numbers. The weights are as they were before the step; {kept}.{rows} {way_out}"
        )
        self.event("not_finite", message, pending.step)
        raise TrainingError(message)

    def judge(self, evaluation: Evaluation) -> None:
        """Report an evaluation and take note of its loss."""
        self.write(evaluation.row(self.progress.step))
        self.throughput.pause()
        self.progress = self.cadence.judged(self.progress, evaluation.loss)

    def tell_early_stop(self) -> None:
        waited = self.progress.evaluations_since_best
        best = f"{self.progress.best_loss:.4f} at step {self.progress.best_step}"
        self.event("early_stop", f"no better held-out loss than {best} in {waited} evaluations: the run ends early")

    def save(self, state: Any, *, final: bool) -> None:
        """Save the state; a failed periodic save is reported and does not end the run."""
        if self.checkpoints is None:
            return
        self.settle()  # an earlier failed save does not prevent this one
        self.watch(f"the checkpoint of step {self.progress.step}")
        self.saving_step = self.progress.step
        try:
            self.checkpoints.save(state, self.progress)
            if final:
                self.saved(self.checkpoints.wait())
        except SaveFailed as error:
            if final:
                raise
            self.event("save_failed", str(error))

    def poll(self) -> None:
        """Report an ended save."""
        try:
            self.saved(None if self.checkpoints is None else self.checkpoints.poll())
        except SaveFailed as error:
            self.event("save_failed", str(error))

    def settle(self) -> None:
        """Wait for the current save, and report its outcome."""
        if self.saving_step is not None:
            self.watch(f"the checkpoint of step {self.saving_step}")
        try:
            self.saved(None if self.checkpoints is None else self.checkpoints.wait())
        except SaveFailed as error:
            self.event("save_failed", str(error))

    def saved(self, step: int | None) -> None:
        if step is not None:
            self.saved_step = step
            self.event("saved", f"checkpoint of step {step} saved", step)


def run_evaluation(
    eval_step: EvalStep,
    trainable: Any,
    frozen: Any,
    batches: Iterable[Batch],
    send: Callable[[Batch], Batch] = jax.device_put,
    heard: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Evaluate on every batch; the sums stay on the device until the last.

    Args:
        eval_step: `make_eval_step`'s function: (trainable, frozen, batch) → sums.
        trainable: the trained weights.
        frozen: the others.
        batches: held-out rows.
        send: puts a batch on the devices.
        heard: is called when the devices have taken a batch, but for the last `AHEAD`.

    Raises:
        TrainingError: the rows weigh nothing, without a target token.
    """
    called: list[LossSums] = []
    with contextlib.closing(prefetched(iter(batches), PREFETCH, transform=send)) as ready:
        for batch in ready:
            called.append(eval_step(trainable, frozen, batch))
            if len(called) > AHEAD:
                jax.block_until_ready(called[-1 - AHEAD])
                heard()
        found: list[LossSums] = jax.device_get(called)
    loss = sum(float(sums.loss_sum) for sums in found)
    totals: dict[str, Any] = {}
    if found:
        totals = jax.tree.map(lambda *parts: sum(map(float, parts)), *(dict(sums.metrics) for sums in found))
    weights = [float(sums.weight) for sums in found if sums.weight is not None]
    weight = sum(weights) if weights else totals.get("num_targets", 0.0)
    if not weight:
        raise TrainingError("the evaluation rows hold no token to predict; expected at least one")
    targets, correct = (int(totals.pop(name, 0)) for name in COUNTS)
    means = {name: tuple(total) if isinstance(total, Mean) else (total, weight) for name, total in totals.items()}
    own: dict[str, Any] = {f"eval_{name}": total / each if each else math.nan for name, (total, each) in means.items()}
    return Evaluation(loss / weight, correct / max(1, targets), targets, own)


def _sent(send: Callable[[Batch], Batch], batch: Batch) -> tuple[int, Batch]:
    """The number of tokens of a batch, and the batch on the devices."""
    return int(np.count_nonzero(batch.segment_ids)), send(batch)


def _row(step: int, values: dict[str, Any], learning_rate: float) -> dict[str, Any]:
    """The row of a train step from its numbers."""
    row: dict[str, Any] = {
        "step": step,
        "loss": float(values["loss"]),
        "grad_norm": float(values["grad_norm"]),
        "learning_rate": learning_rate,
    }
    if "num_targets" in values:
        num_targets, num_correct = (int(values[name]) for name in COUNTS)
        row |= {"token_accuracy": num_correct / max(1, num_targets), "num_targets": num_targets}
    row |= {name: float(value) for name, value in values.items() if name not in (*COUNTS, *STEP_METRICS)}
    if "loss_scale" in values:
        row |= {"loss_scale": float(values["loss_scale"]), "skipped_steps": int(values["skipped_steps"])}
    return row
