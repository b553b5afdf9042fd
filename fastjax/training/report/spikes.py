"""Jumps of the loss.

A step is a spike when its loss is above the median of the steps before it by more than six times their spread. The
spread is the median absolute deviation times 1.4826 (the standard deviation of a normal distribution); even ten spikes
hardly move either. Its floor of 2% of the median excludes the ripples of a very even loss. Consecutive steps are one
spike, at its highest step.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

WINDOW = 50
"""Steps before a step that its expected loss comes from."""
LEAST = 10
"""The least of them; earlier steps are never spikes."""
DEVIATIONS = 6.0
"""Spreads above the median at which a spike begins."""
LEAST_SPREAD = 0.02
"""The least spread, as a part of the median."""


class Spike(NamedTuple):
    """A jump of the loss.

    Attributes:
        step: the step with the highest loss.
        loss: its loss, in nats.
        expected: the median loss of the steps before.
        steps: number of consecutive steps above the threshold.
    """

    step: int
    loss: float
    expected: float
    steps: int


def find_spikes(steps: Float64[np.ndarray, " N"], losses: Float64[np.ndarray, " N"]) -> list[Spike]:
    """The spikes of a run.

    Args:
        steps: numbers of the steps.
        losses: their losses; those that are not finite are ignored.

    Returns:
        The spikes, by step.
    """
    finite = np.isfinite(losses)
    steps, losses = steps[finite], losses[finite]
    spikes: list[Spike] = []
    last = -2
    for index in range(LEAST, len(losses)):
        before = losses[max(0, index - WINDOW) : index]
        expected = float(np.median(before))
        spread = max(1.4826 * float(np.median(np.abs(before - expected))), LEAST_SPREAD * abs(expected))
        loss = float(losses[index])
        if loss <= expected + DEVIATIONS * spread:
            continue
        if last == index - 1:
            former = spikes.pop()
            higher = (int(steps[index]), loss) if loss > former.loss else (former.step, former.loss)
            spikes.append(Spike(*higher, former.expected, former.steps + 1))
        else:
            spikes.append(Spike(int(steps[index]), loss, expected, 1))
        last = index
    return spikes
