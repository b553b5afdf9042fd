"""The search for the longest row, with made-up memories."""

import pytest

from fastjax.planning.longest import longest_row
from fastjax.planning.memory import ALLOCATOR_BYTES, MemoryLimits, StepMemory

ROOM, POSITIONS = MemoryLimits(10e9, 100e9), 1 << 20


def two_pieces(tokens):
    """Beside 4 GB that do not grow; the second piece is steeper."""
    return StepMemory(4 * 10**9, max(60_000 * tokens, 100_000 * tokens - 2 * 10**9) - ALLOCATOR_BYTES, 0)


@pytest.mark.parametrize(
    ("measure", "device", "positions", "longest", "bound"),
    [
        (two_pieces, 10e9, POSITIONS, 80_000, "device"),
        (two_pieces, 5.2e9, POSITIONS, 20_000, "device"),
        (two_pieces, 4.3e9, POSITIONS, 5_000, "device"),
        (two_pieces, 10e9, 70_000, 70_000, "positions"),
        (two_pieces, 10e9, 9_000, 9_000, "positions"),
        (lambda tokens: StepMemory(0, 0, 1_000_000 * tokens), 10e9, POSITIONS, 100_000, "host"),
        (lambda tokens: StepMemory(0, 1000 * min(tokens, 16_383), 0), 10e9, POSITIONS, POSITIONS, "positions"),
    ],
)
def test_the_longest_that_fits_within_a_hundredth(measure, device, positions, longest, bound):
    asked, room = [], ROOM._replace(device=device)

    def counted(tokens):
        asked.append(tokens)
        return measure(tokens)

    found = longest_row(counted, room, positions)
    assert found is not None and found.bound == bound
    assert 0.97 * longest - 128 <= found.tokens <= longest and room.holds(found.memory)
    assert found.memory == measure(found.tokens) and len(asked) == len(set(asked)) <= 6, asked


@pytest.mark.parametrize("positions", [POSITIONS, 70_001])
def test_a_row_that_is_cut_into_equal_parts(positions):
    """Six: of context 3."""
    asked = []
    found = longest_row(lambda tokens: asked.append(tokens) or two_pieces(tokens), ROOM, positions, 6)
    assert found is not None and not any(tokens % 6 for tokens in asked)
    assert found.tokens == 69_996 if positions == 70_001 else 0.97 * 80_000 <= found.tokens <= 80_000


def test_a_step_that_never_fits():
    asked = []
    found = longest_row(lambda tokens: asked.append(tokens) or two_pieces(tokens), MemoryLimits(3.9e9), POSITIONS)
    assert found is None and asked == sorted(asked, reverse=True) and len(asked) <= 7


def test_a_step_that_takes_less_from_some_length_on():
    def cut(tokens):
        return StepMemory(0, tokens * (600_000 if tokens < 16_384 else 60_000), 0)

    long, short = (longest_row(cut, room, POSITIONS) for room in (ROOM, MemoryLimits(1.4e9)))
    assert long is not None and 150_000 < long.tokens <= 158_000
    assert short is not None and 1000 < short.tokens <= 1438 and cut(short.tokens).device <= 1.4e9
