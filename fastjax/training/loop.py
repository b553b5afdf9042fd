"""The loop around the pure train step: batches in, rows of numbers out, checkpoints on the way.

The loop is impure and thin. It dispatches step n + 1 before it reads the numbers of step n, so the device never waits
for the host: JAX returns from a call before the device is done, and only reading a number blocks. A step that is not
finite halts the state on the device, so that one dispatched after it changes nothing. Batches are made and sent to the
device by a thread of their own.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fastjax.data.batches import Batch
from fastjax.data.prefetch import prefetched
from fastjax.errors import TrainingError
from fastjax.training.checkpoint import Checkpoints, Progress, SaveFailed
from fastjax.training.health import GradientCheck
from fastjax.training.metrics import Evaluation, Row, Sink, Throughput
from fastjax.training.signals import StopSignals

TrainStep = Callable[[Any, Any, Batch], tuple[Any, dict[str, jax.Array]]]
EvalStep = Callable[[Any, Any, Batch], tuple[jax.Array, jax.Array, jax.Array]]

#: Batches that wait on the device.
PREFETCH = 2

_START = Progress()


class Cadence(NamedTuple):
    """When what is done, in steps; None: never.

    Attributes:
        evaluate: every so many steps; the last always.
        save: every so many steps; then the last too, which early stopping may make of any.
        save_best: save whenever the held-out loss is the lowest so far.
        patience: end after so many evaluations in a row that are no better than the best.
        threshold: how much lower a held-out loss must be to be better, in nats.
    """

    evaluate: int | None = None
    save: int | None = None
    save_best: bool = False
    patience: int | None = None
    threshold: float = 0.0


_NEVER = Cadence()


class Fitted(NamedTuple):
    """Where a run has come to.

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


class _Pending(NamedTuple):
    """A step that was dispatched and whose numbers have not been read."""

    step: int
    num_tokens: int
    batch: Batch
    metrics: dict[str, jax.Array]


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
    evaluate: Callable[[Any], Evaluation] | None = None,
    checkpoints: Checkpoints | None = None,
    stop: StopSignals | None = None,
    check: GradientCheck | None = None,
    explain: Callable[[Any, Batch, int], str] | None = None,
) -> Fitted:
    """Take steps until there is one for each learning rate.

    Args:
        train_step: `make_train_step`'s function: (state, frozen, batch) → (state, metrics).
        state: the TrainState to start from; it is donated.
        frozen: the weights that are not trained.
        batches: of the steps after `start.step`, at least as many as there are steps to take.
        learning_rates: float32 [steps of the whole run], by the number of updates made before.
        start: where the run stands.
        cadence: when to evaluate, to save, to end early.
        sinks: take the rows, in order.
        throughput: measures the run; None: one that knows the number of steps only.
        evaluate: the held-out evaluation of a trainable tree; None: there is none.
        checkpoints: take the state; None: nothing is saved.
        stop: says that a signal wants the run to end; the step is finished and, with checkpoints, the state saved.
        check: judges the first gradients.
        explain: (state, batch, step) → which rows broke the step.

    Returns:
        Where the run has come to.

    Raises:
        TrainingError: a step whose loss or gradient is not finite, weights without gradient, too few batches, or a
            state that cannot be saved when the run is stopped.
    """
    return _Loop(learning_rates, start, cadence, sinks, throughput, checkpoints, check, explain).run(
        train_step, state, frozen, batches, evaluate, stop or StopSignals()
    )


class _Loop:
    """The impure part of `fit`: what has been seen so far."""

    def __init__(self, learning_rates, start, cadence, sinks, throughput, checkpoints, check, explain):
        self.rates, self.total = learning_rates, len(learning_rates)
        self.progress, self.cadence, self.sinks = start, cadence, sinks
        self.throughput = throughput or Throughput(self.total)
        self.checkpoints, self.check, self.explain = checkpoints, check, explain
        self.pending: _Pending | None = None
        self.saved_step = start.step or None  # a whole checkpoint of this step is there

    def run(self, train_step, state, frozen, batches, evaluate, stop) -> Fitted:
        cadence, evaluation = self.cadence, None
        with contextlib.closing(prefetched(iter(batches), PREFETCH, transform=_send)) as ready:
            while self.progress.step < self.total and not self.exhausted():
                if (item := next(ready, None)) is None:
                    raise TrainingError(
                        f"the data ended after {self.progress.step} steps; expected batches for {self.total}"
                    )
                num_tokens, batch = item
                state, metrics = train_step(state, frozen, batch)
                if self.checkpoints is not None:
                    self.checkpoints.begin()  # while the device is at work
                self.report(state)
                step = self.progress.step + 1
                self.pending, self.progress = (
                    _Pending(step, num_tokens, batch, metrics),
                    self.progress._replace(step=step),
                )
                last = step == self.total
                stopped = stop.received is not None
                look = evaluate is not None and (last or _due(cadence.evaluate, step))
                save = _due(cadence.save, step)
                if look and evaluate is not None:
                    evaluation = evaluate(state.trainable)  # behind the step, for which nothing waits yet
                    self.throughput.pause()
                    self.report(state)
                    save = self.judge(evaluation) or save
                if not last and self.exhausted():
                    last = True
                    self.tell_early_stop()
                stopped = stopped and not last
                save = save or stopped or (last and cadence.save is not None)
                if save or last:
                    self.report(state)
                if save:
                    self.save(state, final=stopped)
                self.poll()
                if stopped:
                    return Fitted(state, self.progress, evaluation, complete=False)
        self.settle()
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
        values = jax.device_get(pending.metrics)
        rate = float(self.rates[min(int(values["updates"]), self.total - 1)])
        row = _row(pending.step, values, rate) | self.throughput.step(pending.step, pending.num_tokens)
        finite, lost = bool(values["finite"]), not ("loss_scale" in values and float(values["loss_scale"]) > 1)
        if not finite and not lost:
            row["skipped"] = True
        self.progress = self.progress._replace(seconds=float(row["seconds"] or 0.0))
        self.write(row)
        if not finite and lost:
            self.fail(state, pending, row)
        if finite and self.check is not None:
            self.check.step(values["squared_norms"], rate, last=pending.step == self.total)

    def fail(self, state: Any, pending: _Pending, row: Row) -> None:
        """A step was not finite: keep the state that it left as it was, and say where to look."""
        good = self.progress._replace(step=pending.step - 1)
        kept = "nothing was saved"
        if self.checkpoints is not None and good.step > 0:
            self.settle()
            try:
                if self.saved_step != good.step:
                    self.checkpoints.save(state._replace(halted=jnp.zeros((), bool)), good)
                    self.checkpoints.wait()
                kept = f"the state before it is the checkpoint of step {good.step}"
            except SaveFailed as error:
                kept = str(error)
        rows = "" if self.explain is None else f" {self.explain(state, pending.batch, pending.step)}"
        message = (
            f"step {pending.step}: the loss is {row['loss']} and the gradient norm {row['grad_norm']}; expected finite "
            f"numbers. The weights are as they were before the step; {kept}.{rows} Look at these rows, or try a lower "
            "optimizer.learning_rate"
        )
        self.event("not_finite", message, pending.step)
        raise TrainingError(message)

    def judge(self, evaluation: Evaluation) -> bool:
        """Take note of an evaluation; whether it is to be saved as the best."""
        self.write(evaluation.row(self.progress.step))
        self.throughput.pause()
        best = self.progress.best_loss
        if best is None or evaluation.loss < best - self.cadence.threshold:
            self.progress = self.progress._replace(
                best_loss=evaluation.loss, best_step=self.progress.step, evaluations_since_best=0
            )
            return self.cadence.save_best
        waited = self.progress.evaluations_since_best + 1
        self.progress = self.progress._replace(evaluations_since_best=waited)
        return False

    def exhausted(self) -> bool:
        """Whether patience is at its end; it can be so before the first step of a run that goes on."""
        return self.cadence.patience is not None and self.progress.evaluations_since_best >= self.cadence.patience

    def tell_early_stop(self) -> None:
        waited = self.progress.evaluations_since_best
        best = f"{self.progress.best_loss:.4f} at step {self.progress.best_step}"
        self.event("early_stop", f"no better held-out loss than {best} in {waited} evaluations: the run ends early")

    def save(self, state: Any, *, final: bool) -> None:
        """Save the state; a periodic save that fails is told and does not end the run."""
        if self.checkpoints is None:
            return
        self.settle()  # what became of the save before this one is no reason not to try it
        try:
            self.checkpoints.save(state, self.progress)
            if final:
                self.saved(self.checkpoints.wait())
        except SaveFailed as error:
            if final:
                raise
            self.event("save_failed", str(error))

    def poll(self) -> None:
        """Tell of a save that has ended."""
        try:
            self.saved(None if self.checkpoints is None else self.checkpoints.poll())
        except SaveFailed as error:
            self.event("save_failed", str(error))

    def settle(self) -> None:
        """Wait for the save that is being written, and tell how it ended."""
        try:
            self.saved(None if self.checkpoints is None else self.checkpoints.wait())
        except SaveFailed as error:
            self.event("save_failed", str(error))

    def saved(self, step: int | None) -> None:
        if step is not None:
            self.saved_step = step
            self.event("saved", f"checkpoint of step {step} saved", step)


def run_evaluation(eval_step: EvalStep, trainable: Any, frozen: Any, batches: Iterable[Batch]) -> Evaluation:
    """Evaluate on every batch; the sums stay on the device until the last.

    Args:
        eval_step: `make_eval_step`'s function: (trainable, frozen, batch) → (loss sum, targets, correct ones).
        trainable: the weights that are trained.
        frozen: the others.
        batches: held-out rows.

    Raises:
        TrainingError: there is not one target token in the rows.
    """
    with contextlib.closing(prefetched(iter(batches), PREFETCH, transform=jax.device_put)) as ready:
        sums = jax.device_get([tuple(eval_step(trainable, frozen, batch)) for batch in ready])
    loss, targets, correct = np.sum(np.asarray(sums, np.float64).reshape(-1, 3), axis=0).tolist()
    if not targets:
        raise TrainingError("the evaluation rows hold no token to predict; expected at least one")
    return Evaluation(loss / targets, correct / targets, int(targets))


def _send(batch: Batch) -> tuple[int, Batch]:
    """The number of tokens of a batch, and the batch on the device."""
    return int(np.count_nonzero(batch.segment_ids)), jax.device_put(batch)


def _due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0


def _row(step: int, values: dict[str, Any], learning_rate: float) -> dict[str, Any]:
    """The row of a train step from its numbers."""
    num_targets = int(values["num_targets"])
    row = {
        "step": step,
        "loss": float(values["loss"]),
        "grad_norm": float(values["grad_norm"]),
        "learning_rate": learning_rate,
        "token_accuracy": int(values["num_correct"]) / max(1, num_targets),
        "num_targets": num_targets,
    }
    if "loss_scale" in values:
        row |= {"loss_scale": float(values["loss_scale"]), "skipped_steps": int(values["skipped_steps"])}
    return row
