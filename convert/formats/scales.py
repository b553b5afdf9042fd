"""Scales of quantised values, as every format here that is made from values has them.

The arithmetic is float32 in the order that is written, one rounding an operation: quotients are true quotients (a
compiler that multiplies by a constant's reciprocal gets other bits), maxima and minima are exact, and what is added to
a quotient is added after its rounding. A group whose scale would lie below `SMALLEST` decodes to zeros, so that
subnormal numbers, which some devices take for zero, never matter.
"""

import numpy as np
from jaxtyping import Float

SMALLEST = np.float32(2.0**-90)
"""Least scale that is kept."""


def divided(largest: Float[np.ndarray, "..."], steps: float, dtype: np.dtype) -> Float[np.ndarray, "..."]:
    """The scales of groups: ``largest / steps`` rounded to `dtype`, half to even.

    Args:
        largest: float32, the largest magnitude of each group, or its range.
        steps: What it is divided by: the largest code, or the number of steps in the range.
        dtype: float32, bfloat16 or float16, in which the scales are stored: codes are made with the rounded ones.

    Returns:
        float32, values of `dtype`; where the quotient is below `SMALLEST` the machine epsilon of `dtype`, as
        compressed-tensors has it for zeros, and infinity where `dtype` cannot hold it.
    """
    with np.errstate(over="ignore"):
        scales = (largest / np.float32(steps)).astype(dtype).astype(np.float32)
    return np.where(scales < SMALLEST, _EPSILONS[np.dtype(dtype).name], scales)


_EPSILONS = {"float32": np.float32(2.0**-23), "bfloat16": np.float32(2.0**-7), "float16": np.float32(2.0**-10)}
