"""The loop's decisions as pure functions: the actions after a step, from the progress of the run."""

import math
from typing import Literal, NamedTuple


class Progress(NamedTuple):
    """Progress of a run, stored beside its state.

    Attributes:
        step: steps taken, skipped ones included; the batches of as many steps have been used.
        best_loss: the lowest held-out loss; None before the first evaluation.
        best_step: its step.
        evaluations_since_best: evaluations that were no better.
        seconds: of the run so far.
    """

    step: int = 0
    best_loss: float | None = None
    best_step: int | None = None
    evaluations_since_best: int = 0
    seconds: float = 0.0


class Actions(NamedTuple):
    """The loop's actions after a step, in this order.

    Attributes:
        evaluate: run the held-out evaluation; the other actions follow from its loss, by another `Cadence.after`.
        log: read the step's numbers now; otherwise they are read while the next step runs.
        save: save the state.
        stop: end the run: "finished" its last step, out of "patience", or a "signal" came; None: go on.
    """

    evaluate: bool = False
    log: bool = False
    save: bool = False
    stop: Literal["finished", "patience", "signal"] | None = None


class Cadence(NamedTuple):
    """The steps of a run, and intervals in steps; None: never.

    Attributes:
        total: steps of the run.
        held_out: whether there are held-out data.
        evaluate: every so many steps; the last always.
        save: every so many steps; then the last too, which early stopping may make of any.
        save_best: save whenever the held-out loss is the lowest so far.
        patience: end after so many evaluations in a row that are no better than the best.
        threshold: how much lower a held-out loss must be to be better, in nats.
    """

    total: int
    held_out: bool = False
    evaluate: int | None = None
    save: int | None = None
    save_best: bool = False
    patience: int | None = None
    threshold: float = 0.0

    def after(
        self, progress: Progress, *, evaluated: bool = False, signalled: bool = False, ended: bool = False
    ) -> Actions:
        """The actions after a step.

        Args:
            progress: of the run, this step included; after an evaluation as `judged` returns it.
            evaluated: whether the evaluation of this step is done.
            signalled: whether a signal wants the run to end.
            ended: whether a program has made this step the last one.
        """
        step, last = progress.step, ended or progress.step == self.total
        if self.held_out and not evaluated and (last or _due(self.evaluate, step)):
            return Actions(evaluate=True)
        stop = None
        if last:
            stop = "finished"
        elif self.exhausted(progress):
            stop = "patience"
        elif signalled:
            stop = "signal"
        best = evaluated and self.save_best and progress.best_step == step
        save = best or _due(self.save, step) or stop == "signal" or (stop is not None and self.save is not None)
        return Actions(log=save or stop in ("finished", "patience"), save=save, stop=stop)

    def judged(self, progress: Progress, loss: float) -> Progress:
        """The progress after an evaluation.

        Args:
            progress: before it.
            loss: the held-out loss, in nats.
        """
        best = progress.best_loss
        if best is None or math.isnan(best) or loss < best - self.threshold:
            return progress._replace(best_loss=loss, best_step=progress.step, evaluations_since_best=0)
        return progress._replace(evaluations_since_best=progress.evaluations_since_best + 1)

    def exhausted(self, progress: Progress) -> bool:
        """Whether patience is at its end; a resumed run may begin so."""
        return self.patience is not None and progress.evaluations_since_best >= self.patience


def interval(every: int | float | Literal["epoch"] | None, total: int, steps_per_epoch: int | None) -> int | None:
    """The steps between two evaluations, or saves, as `Cadence` takes them.

    Args:
        every: the setting: a number of steps, a share of `total` below 1, "epoch", or None.
        total: steps of the run.
        steps_per_epoch: None: unknown, where "epoch" is refused before.

    Returns:
        A share rounded up, as in transformers.
    """
    if every is None:
        return None
    if every == "epoch":
        assert steps_per_epoch is not None, "TrainConfig refuses epochs of streamed data"
        return steps_per_epoch
    return math.ceil(every * total) if every < 1 else int(every)


def _due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0
