"""Block sizes of the Triton kernels."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Block sizes of a program.

    Attributes:
        rows: tokens of a tile, a power of two.
        heads: heads of a tile, a power of two that divides the numbers of query and of key heads.
        num_warps: warps of a program.
    """

    rows: int
    heads: int
    num_warps: int


def tiles(heads: int, key_heads: int, size: int) -> Tiles:
    """Block sizes by the numbers of query and key heads and the head size.

    A tile has 8 KiB of 16-bit features: each of 128 threads has four loads of 16 bytes in flight. With two heads in it
    Triton loads the tables into the registers that need them; otherwise they go through shared memory, which took 12%
    longer on an H200.
    """
    own = min(common(heads, key_heads), 2)
    return Tiles(rows=max(1, power_of_2(4096 // (own * size))), heads=own, num_warps=4)


def common(heads: int, key_heads: int) -> int:
    """The largest power of two that divides both numbers."""
    both = heads | key_heads
    return both & -both


def power_of_2(number: int) -> int:
    """The largest power of two that is at most `number`, 1 for 0."""
    return 1 << max(number, 1).bit_length() - 1
