"""The loop around the pure train step: batches in, rows of numbers out.

The loop is impure and thin. It dispatches step n + 1 before it reads the numbers of step n, so the device never waits
for the host: JAX returns from a call before the device is done, and only reading a number blocks.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fastjax.data.batches import Batch
from fastjax.errors import TrainingError
from fastjax.training.metrics import Evaluation, Sink, Throughput

TrainStep = Callable[[Any, Any, Batch], tuple[Any, dict[str, jax.Array]]]
EvalStep = Callable[[Any, Any, Batch], tuple[jax.Array, jax.Array, jax.Array]]


class _Pending(NamedTuple):
    """A step that was dispatched and whose numbers have not been read."""

    step: int
    num_tokens: int
    metrics: dict[str, jax.Array]


def fit(
    train_step: TrainStep,
    state: Any,
    frozen: Any,
    batches: Iterable[Batch],
    *,
    learning_rates: np.ndarray,
    sinks: Sequence[Sink] = (),
    evaluate: Callable[[Any], Evaluation] | None = None,
    eval_steps: int | None = None,
) -> tuple[Any, Evaluation | None]:
    """Take one step for each learning rate.

    Args:
        train_step: `make_train_step`'s function: (state, frozen, batch) → (state, metrics).
        state: the TrainState to start from; it is donated.
        frozen: the weights that are not trained.
        batches: at least as many batches as steps.
        learning_rates: float32 [steps], as the optimizer's schedule has them, for the rows.
        sinks: take the rows, in order.
        evaluate: the held-out evaluation of a trainable tree; None: there is none.
        eval_steps: evaluate after every so many steps; None: after the last only.

    Returns:
        The state after the last step, and the last evaluation.

    Raises:
        TrainingError: a step whose loss or gradient is not finite, or too few batches.
    """
    total = len(learning_rates)
    throughput = Throughput(total)
    pending: _Pending | None = None
    evaluation: Evaluation | None = None
    done = 0

    def report(step: _Pending) -> None:
        row = _read(step, float(learning_rates[step.step - 1]))
        row |= throughput.step(step.step, step.num_tokens)
        finite = row.pop("finite")
        for sink in sinks:
            sink.write(row)
        if not finite:
            raise TrainingError(
                f"step {step.step}: the loss is {row['loss']} and the gradient norm {row['grad_norm']}; expected "
                "finite numbers. Nothing was saved. Try a lower optimizer.learning_rate, or look at the rows of "
                "that step"
            )

    for done, batch in enumerate(itertools.islice(batches, total), start=1):
        state, metrics = train_step(state, frozen, batch)
        if pending is not None:
            report(pending)
        pending = _Pending(done, int(np.count_nonzero(batch.segment_ids)), metrics)
        if evaluate is not None and (done == total or (eval_steps is not None and done % eval_steps == 0)):
            report(pending)
            pending = None
            evaluation = evaluate(state.trainable)
            for sink in sinks:
                sink.write(evaluation.row(done))
            throughput.pause()
    if pending is not None:
        report(pending)
    if done < total:
        raise TrainingError(f"the data ended after {done} steps; expected batches for {total}")
    return state, evaluation


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
    sums = jax.device_get([tuple(eval_step(trainable, frozen, batch)) for batch in batches])
    loss, targets, correct = np.sum(np.asarray(sums, np.float64).reshape(-1, 3), axis=0).tolist()
    if not targets:
        raise TrainingError("the evaluation rows hold no token to predict; expected at least one")
    return Evaluation(loss / targets, correct / targets, int(targets))


def _read(pending: _Pending, learning_rate: float) -> dict[str, Any]:
    """Wait for a step and read its numbers."""
    values = {name: np.asarray(value).item() for name, value in jax.device_get(pending.metrics).items()}
    num_targets = int(values["num_targets"])
    return {
        "step": pending.step,
        "loss": values["loss"],
        "grad_norm": values["grad_norm"],
        "learning_rate": learning_rate,
        "token_accuracy": values["num_correct"] / max(1, num_targets),
        "num_targets": num_targets,
        "finite": values["finite"],
    }
