"""Types of settings: numbers with their ranges."""

from typing import Annotated, Literal

from annotated_types import Interval, MinLen, Predicate

from fastjax.limits import MAX_INTEGER

Count = Annotated[int, Interval(ge=1)]
Positive = Annotated[float, Interval(gt=0)]
NotNegative = Annotated[float, Interval(ge=0)]
Part = Annotated[float, Interval(ge=0, lt=1)]
Folder = Annotated[str, MinLen(1), "the name of a folder"]
Repository = Annotated[str, MinLen(1), "a folder or a name on the hub"]
Seed = Annotated[int, Interval(ge=0, le=MAX_INTEGER)]


def is_count_or_share(value: int | float) -> bool:
    """Whether a value is a whole number from 1, or a share below 1."""
    return 0 < value < 1 or (value >= 1 and value % 1 == 0)


Steps = Annotated[
    int | float, Predicate(is_count_or_share), "a number of steps from 1 or a share of them between 0 and 1"
]
Cadence = Steps | Literal["epoch"]
"""How often something is done in a run."""
