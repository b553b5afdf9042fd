"""The longest row whose step fits, found by few compilations.

A step's memory grows with its rows by straight pieces, each steeper than the one before. So a line through two lengths
that fit points at the longest or beyond it, and one through a length that fits and one that does not, short of it.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from fastjax.planning.memory import MemoryLimits, StepMemory

#: The first length that is compiled, the factor to the second, and the most compilations.
_START, _FACTOR, _MOST = 16384, 4, 7
#: Lengths are multiples of 128 tokens, those from `_START` of 1,024, and all of the parts that a row is cut into. The
#: search ends within this share of the longest.
_SHORT, _LONG, _CLOSE = 128, 1024, 0.01


class LongestRow(NamedTuple):
    """The longest row found.

    Attributes:
        tokens: of the row.
        memory: of its step.
        bound: what a longer one has too little of: "device", "host" or "positions".
    """

    tokens: int
    memory: StepMemory
    bound: str


def longest_row(
    measure: Callable[[int], StepMemory], limits: MemoryLimits, positions: int, parts: int = 1
) -> LongestRow | None:
    """Search for the longest row; None: the shortest one tried does not fit.

    Args:
        measure: compiles the step of rows of so many tokens.
        limits: what it may take.
        positions: the most tokens that a row may have.
        parts: of equal size, that a row is cut into.
    """
    positions -= positions % parts
    measured: dict[int, StepMemory] = {}
    fits, fails, length = 0, positions + 1, _rounded(_START, positions, parts)
    while fits < length < fails and len(measured) < _MOST and (not fits or length - fits > _CLOSE * fits):
        measured[length] = measure(length)
        if limits.holds(measured[length]):
            fits = length
        else:
            fails = length
        length = _next(measured, limits, positions, parts, fits, fails)
    if not fits:
        return None
    if fits == positions:
        return LongestRow(fits, measured[fits], "positions")
    aims = _aims(measured, limits, fits)
    return LongestRow(fits, measured[fits], min(aims, key=aims.__getitem__))


def _next(
    measured: dict[int, StepMemory], limits: MemoryLimits, positions: int, parts: int, fits: int, fails: int
) -> int:
    """The length to try next, between those that fit and those that do not."""
    if len(measured) == 1:
        return _rounded(fits * _FACTOR if fits else fails / _FACTOR, positions, parts)
    length = min(_aims(measured, limits, fits).values())
    if fails > positions:
        return _rounded(length, positions, parts)
    if not fits:
        return _rounded(min(length, fails / 2), positions, parts)
    return min(_rounded(length, positions, parts), fails - math.lcm(_SHORT, parts))


def _aims(measured: dict[int, StepMemory], limits: MemoryLimits, fits: int) -> dict[str, float]:
    """Where lines through the two lengths around the longest that fits meet the limits, by what they limit."""
    known = sorted(measured)
    index = max(1, min(known.index(fits) + 1, len(known) - 1)) if fits else 1
    first, second = known[index - 1], known[index]

    def aim(name: str) -> float:
        start, limit = getattr(measured[first], name), getattr(limits, name)
        slope = (getattr(measured[second], name) - start) / (second - first)
        return first + (limit - start) / slope if slope > 0 else float("inf")

    return {name: aim(name) for name in ("device", "host")}


def _rounded(length: float, positions: int, parts: int) -> int:
    if length >= positions:
        return positions
    step = math.lcm(_LONG if length >= _START else _SHORT, parts)
    return max(0, int(length) // step * step)
