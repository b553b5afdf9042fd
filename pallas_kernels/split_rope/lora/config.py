"""Block sizes of the Triton kernel, and the head sizes that it serves."""

import dataclasses

#: Head sizes whose halves are such widths.
SIZES = (32, 64, 128, 256)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Block sizes of a program.

    Attributes:
        rows: tokens of a tile.
        heads: most heads a program.
        loop: most tiles of tokens a program.
        num_warps: warps of a program.
        num_stages: tiles in flight.
    """

    rows: int
    heads: int
    loop: int
    num_warps: int
    num_stages: int


#: The block sizes, whatever the rank.
TILES = Tiles(rows=32, heads=4, loop=1, num_warps=4, num_stages=1)
