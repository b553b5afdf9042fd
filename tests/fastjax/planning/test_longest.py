"""The search for the longest row, with made-up memories."""

import pytest

from fastjax.planning.longest import Limits, longest_row
from fastjax.planning.memory import ALLOCATOR_BYTES, StepMemory

ROOM = Limits(10e9, 100e9, 1 << 20)


def two_pieces(tokens):
    """Beside 4 GB that do not grow; the second piece is steeper."""
    return StepMemory(4 * 10**9, max(60_000 * tokens, 100_000 * tokens - 2 * 10**9) - ALLOCATOR_BYTES, 0)


@pytest.mark.parametrize(
    ("measure", "limits", "longest", "bound"),
    [
        (two_pieces, ROOM, 80_000, "device"),
        (two_pieces, ROOM._replace(device=5.2e9), 20_000, "device"),
        (two_pieces, ROOM._replace(device=4.3e9), 5_000, "device"),
        (two_pieces, ROOM._replace(tokens=70_000), 70_000, "positions"),
        (two_pieces, ROOM._replace(tokens=9_000), 9_000, "positions"),
        (lambda tokens: StepMemory(0, 0, 1_000_000 * tokens), ROOM, 100_000, "host"),
        (lambda tokens: StepMemory(0, 1000 * min(tokens, 16_383), 0), ROOM, 1 << 20, "positions"),
    ],
)
def test_the_longest_that_fits_within_a_hundredth(measure, limits, longest, bound):
    asked = []

    def counted(tokens):
        asked.append(tokens)
        return measure(tokens)

    found = longest_row(counted, limits)
    assert found is not None and found.bound == bound
    assert 0.97 * longest - 128 <= found.tokens <= longest and limits.hold(found.memory)
    assert found.memory == measure(found.tokens) and len(asked) == len(set(asked)) <= 6, asked


def test_a_step_that_never_fits():
    asked = []
    found = longest_row(lambda tokens: asked.append(tokens) or two_pieces(tokens), ROOM._replace(device=3.9e9))
    assert found is None and asked == sorted(asked, reverse=True) and len(asked) <= 7


def test_a_step_that_takes_less_from_some_length_on():
    def cut(tokens):
        return StepMemory(0, tokens * (600_000 if tokens < 16_384 else 60_000), 0)

    long, short = longest_row(cut, ROOM), longest_row(cut, ROOM._replace(device=1.4e9))
    assert long is not None and 150_000 < long.tokens <= 158_000
    assert short is not None and 1000 < short.tokens <= 1438 and cut(short.tokens).device <= 1.4e9
