"""The held-out evaluation: the sums of all batches, and their means."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax

from fastjax.data.batches import Batch
from fastjax.data.prefetch import Prefetched
from fastjax.errors import TrainingError
from fastjax.training.loss import LossSums, Mean
from fastjax.training.metrics import Evaluation
from fastjax.training.step import COUNTS

EvalStep = Callable[[Any, Any, Batch], LossSums]

#: Batches queued on the device, and those of an evaluation that devices may have before them.
PREFETCH, AHEAD = 2, 8


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
    with Prefetched((send(batch) for batch in batches), PREFETCH) as ready:
        for batch in ready:
            called.append(eval_step(trainable, frozen, batch))
            if len(called) > AHEAD:
                jax.block_until_ready(called[-1 - AHEAD])
                heard()
        batch_sums: list[LossSums] = jax.device_get(called)
    loss = sum(float(sums.loss_sum) for sums in batch_sums)
    totals: dict[str, Any] = {}
    if batch_sums:
        totals = jax.tree.map(lambda *parts: sum(map(float, parts)), *(dict(sums.metrics) for sums in batch_sums))
    weights = [float(sums.weight) for sums in batch_sums if sums.weight is not None]
    weight = sum(weights) if weights else totals.get("num_targets", 0.0)
    if not weight:
        raise TrainingError("the evaluation rows hold no token to predict; expected at least one")
    targets, correct = (int(totals.pop(name, 0)) for name in COUNTS)
    means = {name: tuple(total) if isinstance(total, Mean) else (total, weight) for name, total in totals.items()}
    measurements: dict[str, Any] = {
        f"eval_{name}": total / each if each else math.nan for name, (total, each) in means.items()
    }
    return Evaluation(loss / weight, correct / max(1, targets), targets, measurements)
