"""Jumps of the loss.

A step is a spike when its loss is above the median of the steps before it by more than six times their spread. The
spread is the median absolute deviation, times 1.4826, which makes it the standard deviation of a normal distribution; a
spike itself, or ten, hardly move either. It is taken as at least 2% of the median, so that a very even loss does not
make a spike of every ripple. Steps that follow each other are one spike, at its highest step.
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
        steps: how many steps in a row were too high.
    """

    step: int
    loss: float
    expected: float
    steps: int


def find_spikes(steps: Float64[np.ndarray, " N"], losses: Float64[np.ndarray, " N"]) -> list[Spike]:
    """The spikes of a run.

    Args:
        steps: numbers of the steps.
        losses: their losses; one that is not finite is none of a spike, it is counted elsewhere.

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
