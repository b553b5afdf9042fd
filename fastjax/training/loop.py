"""The loop around the pure train step: it takes steps, tells observers, and asks `cadence` what comes after each.

The loop is impure and thin; metrics, evaluation, checkpoints, signals and all else are observers (`observers`). It
dispatches step n + 1 before it reads the numbers of step n, so the device never waits for the host: JAX returns from a
call before the device is done, and only reading a number blocks. A step that is not finite halts the state on the
device, so that one dispatched after it changes nothing. A thread makes batches and sends them to the device
(`sent_ahead`).
"""

import collections
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fastjax.data.batches import Batch
from fastjax.data.prefetch import Prefetched
from fastjax.errors import TrainingError
from fastjax.training.cadence import Actions, Cadence, Progress
from fastjax.training.metrics import Evaluation, Row

#: Batches queued on the device.
PREFETCH = 2
#: Steps whose time tells how long the next may take.
_LAST_STEPS = 16


class LoopState(NamedTuple):
    """A run, as far as it has come.

    Attributes:
        state: the TrainState after the last step.
        progress: of the run.
        evaluation: the last one; None: there was none.
        complete: whether the run is over, by its last step or by early stopping; False: a signal has stopped it.
    """

    state: Any
    progress: Progress = Progress()
    evaluation: Evaluation | None = None
    complete: bool = False


class Step(NamedTuple):
    """A step that was taken.

    Attributes:
        number: from 1.
        num_tokens: of its batch, padding not counted.
        batch: on the devices.
        values: its metrics, as of `make_train_step`; on the host once they are read.
        called: when its call began, in seconds of `time.perf_counter`.
        returned: when its call returned.
    """

    number: int
    num_tokens: int
    batch: Batch
    values: Mapping[str, Any]
    called: float
    returned: float

    @property
    def finite(self) -> bool:
        """Whether it has changed the weights."""
        return bool(self.values["finite"])

    @property
    def lost(self) -> bool:
        """Whether it is not finite, and no smaller loss scale mends that."""
        scaled = float(self.values.get("loss_scale", 0.0)) > 1
        return not self.finite and not (scaled and np.isfinite(self.values["loss"]))


class Observer:
    """A part of a run beside its steps, which the loop tells what happens; each method here does nothing."""

    def waits(self, what: str | None, usual: float | None = None) -> None:
        """The loop begins to wait.

        Args:
            what: it waits for, in words; None: something that may take any time, and is no part of a step.
            usual: seconds that the slowest of the last has taken; None: that says nothing about this one.
        """

    def ends(self) -> bool:
        """Whether the run is to end with the step that is under way."""
        return False

    def before(self, loop: "Loop") -> None:
        """The next step's batch is there; its call comes next."""

    def called(self, loop: "Loop") -> None:
        """The device has its next step: what the host does now costs no time."""

    def measured(self, loop: "Loop", step: Step) -> None:
        """The numbers of a step have been read."""

    def write(self, row: Row) -> None:
        """Some observer reports a row."""

    def after(self, loop: "Loop") -> None:
        """A step was taken; `loop.actions` says what comes now. The observers' order is that of the actions."""

    def over(self, loop: "Loop") -> None:
        """The run is complete."""


def fit(
    step: Callable[[Any, Batch], tuple[Any, dict[str, jax.Array]]],
    start: LoopState,
    batches: Iterable[tuple[int, Batch]],
    cadence: Cadence,
    observers: Sequence[Observer] = (),
) -> LoopState:
    """Take steps until there are `cadence.total`, or an observer or the cadence ends the run.

    Args:
        step: (state, batch) → (state, metrics): `make_train_step`'s with the frozen weights. The state is donated.
        start: the state and the progress so far.
        batches: of the steps after `start`, each with its number of tokens, as of `sent_ahead`.
        cadence: the number of steps; when to evaluate, to save, to end early.
        observers: told in this order.

    Returns:
        The end of the loop.

    Raises:
        TrainingError: too few batches; and what the observers raise.
    """
    return Loop(start, cadence, observers).run(step, iter(batches))


@contextlib.contextmanager
def sent_ahead(
    batches: Iterable[Batch], send: Callable[[Batch], Batch] = jax.device_put
) -> Iterator[Iterator[tuple[int, Batch]]]:
    """The context in which a thread makes batches and sends them to the devices.

    Args:
        batches: on the host.
        send: puts a batch on the devices.

    Yields:
        Each batch on the devices, with its number of tokens.
    """
    sent = ((int(np.count_nonzero(batch.segment_ids)), send(batch)) for batch in batches)
    with Prefetched(sent, PREFETCH) as ready:
        yield ready


class Loop:
    """The loop as its observers see it.

    Attributes:
        state: after the last step that was called.
        progress: of the run, that step included.
        evaluation: the last one; None: there was none.
        cadence: of the run.
        signalled: whether a signal wants the run to end; an observer sets it.
        new_length: tokens of a row of the step under way, where it is the first with as many; None: it is not.
    """

    def __init__(self, start: LoopState, cadence: Cadence, observers: Sequence[Observer]):
        self.state, self.progress, self.evaluation, _ = start
        self.cadence, self.signalled = cadence, False
        self.new_length: int | None = None
        self._lengths: set[int] = set()
        self._observers = observers
        self._evaluated: int | None = None  # this step is
        self._pending: Step | None = None  # a dispatched step with unread numbers
        self._took: collections.deque[float] = collections.deque(maxlen=_LAST_STEPS)

    def run(self, step: Callable[..., Any], batches: Iterator[tuple[int, Batch]]) -> LoopState:
        """Take the steps; see `fit`."""
        over, complete = self.progress.step >= self.cadence.total or self.cadence.exhausted(self.progress), True
        while not over:
            self._take(step, batches)
            for observer in self._observers:
                observer.after(self)
            stop = self.actions.stop
            over, complete = stop is not None, stop != "signal"
        self.read()
        if complete:
            for observer in self._observers:
                observer.over(self)
        self.waits(None)
        return LoopState(self.state, self.progress, self.evaluation, complete)

    def _take(self, step: Callable[..., Any], batches: Iterator[tuple[int, Batch]]) -> None:
        """Call the next step, and read the numbers of the one before while it runs."""
        number = self.progress.step + 1
        self.waits(f"the batch of step {number}, from the data")
        if (item := next(batches, None)) is None:
            raise TrainingError(f"the data ended after {number - 1} steps; expected batches for {self.cadence.total}")
        num_tokens, batch = item
        length = batch.tokens.shape[-1]
        self.new_length = None if length in self._lengths else length
        self._lengths.add(length)
        for observer in self._observers:
            observer.before(self)
        called = time.perf_counter()
        self.waits(f"the call of step {number}")
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            self.state, metrics = step(self.state, batch)
        returned = time.perf_counter()
        for observer in self._observers:
            observer.called(self)
        self.read()
        self._pending = Step(number, num_tokens, batch, metrics, called, returned)
        self.progress = self.progress._replace(step=number)

    @property
    def actions(self) -> Actions:
        """The actions after the last step; evaluation first, since the others follow from its loss."""
        evaluated = self._evaluated == self.progress.step
        ended = any(observer.ends() for observer in self._observers)
        return self.cadence.after(self.progress, evaluated=evaluated, signalled=self.signalled, ended=ended)

    def read(self) -> None:
        """Read the last step's numbers, if they are unread, for the observers."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        self.waits(f"the numbers of step {pending.number}", max(self._took, default=None))
        step = pending._replace(values=jax.device_get(pending.values))
        self._took.append(time.perf_counter() - step.called)
        for observer in self._observers:
            observer.measured(self, step)

    def judge(self, evaluation: Evaluation) -> None:
        """Take note of the evaluation after the last step.

        Args:
            evaluation: of the state.
        """
        self.evaluation, self._evaluated = evaluation, self.progress.step
        self.progress = self.cadence.judged(self.progress, evaluation.loss)

    def waits(self, what: str | None, usual: float | None = None) -> None:
        """Tell what the loop, or an observer, waits for; see `Observer.waits`."""
        for observer in self._observers:
            observer.waits(what, usual)

    def write(self, row: Row) -> None:
        """Report a row.

        Args:
            row: as in `metrics`.
        """
        for observer in self._observers:
            observer.write(row)

    def event(self, kind: str, message: str, step: int | None = None, **more: Any) -> None:
        """Report an event.

        Args:
            kind: of the event.
            message: for people.
            step: None: the last one.
            more: further fields of the row.
        """
        self.write({"step": self.progress.step if step is None else step, "event": kind, "message": message, **more})
