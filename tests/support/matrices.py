"""Shapes of weights that tests share."""

from typing import NamedTuple


class Matrix(NamedTuple):
    """A weight [out, in]."""

    name: str
    shape: tuple[int, int]


#: Llama 3 8B, projections of one input concatenated.
LLAMA_8B = (
    Matrix("qkv", (6144, 4096)),
    Matrix("o", (4096, 4096)),
    Matrix("gate_up", (28672, 4096)),
    Matrix("down", (4096, 14336)),
)

#: The matrix of the published figures.
BENCHMARK = LLAMA_8B[3]

#: Whole blocks in whole rows, few and odd numbers of blocks.
WHOLE_ROWS = (
    Matrix("one block", (1, 64)),
    Matrix("tile and a bit", (37, 192)),
    Matrix("many tiles", (64, 256)),
)

#: Blocks that cross rows, partial blocks, odd sizes.
IRREGULAR = (
    Matrix("whole blocks cross rows", (16, 100)),
    Matrix("partial block", (3, 30)),
    Matrix("odd", (7, 13)),
    Matrix("one element", (1, 1)),
)
