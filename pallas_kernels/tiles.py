"""Tiles of kernels around low-rank products.

Triton reads the tiles of a loop ahead into shared memory. A matrix product of the last lines of the loop's body may
still be at work when the tiles for a later round are fetched; its operands have one buffer more for that, but not those
that are used otherwise too, in registers or by a product of another kind (triton-lang/triton#6691, compiled so by jax
0.10 and 0.11): they would be overwritten under the product. So a kernel lets a round wait: it puts another product,
whose result the body uses, behind that one, or makes the sum over rounds in registers, which takes a difference, since
Triton gives a sum to the product. Where neither serves it reads such a tile twice, by a second reference to the array.
Tests look for it in what is compiled (`tests/support/hazards.py`).
"""

import dataclasses

#: Ranks that kernels serve: a tile's width is a power of two, and a matrix instruction at least 16 deep.
RANKS = (16, 32, 64, 128)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Block sizes of a program.

    Attributes:
        rows: tokens of a tile.
        columns: most features of a tile; of a gated block those of gate, and as many of up.
        loop: most tiles a program, of tokens; of a gated block's forward kernel, of features.
        num_warps: warps of a program.
        num_stages: tiles in flight.
    """

    rows: int
    columns: int
    loop: int
    num_warps: int
    num_stages: int


def padded_rank(rank: int) -> int:
    """The smallest rank from `rank` on that kernels serve, reached by padding with zeros; itself beyond the largest."""
    return next((size for size in RANKS if size >= rank), rank)


def width(count: int, most: int) -> int:
    """The largest power of two that divides `count` and is at most `most`: the sides of a tile are such."""
    return min(count & -count, most)


def divisor(count: int, most: int) -> int:
    """The largest divisor of `count` that is at most `most`."""
    return next(size for size in range(min(count, most), 0, -1) if count % size == 0)
