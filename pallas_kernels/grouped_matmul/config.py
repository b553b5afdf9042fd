"""Block sizes of the kernels and the rules that choose them."""

from typing import NamedTuple

#: On Hopper: terms of a piece of a sum, and the multiple that every summed or written dimension is padded to.
TERMS = 64
#: On Hopper: rows of the tile of one thread block, half of them each multiplying warpgroup's.
ROWS = 128


class MatmulConfig(NamedTuple):
    """Block sizes of a product on Hopper.

    Attributes:
        columns: of a thread block's tile, beside its 128 rows (128 columns of x in the gradient of the matrices).
        stages: pieces of 64 terms in shared memory at a time.
        cluster: thread blocks that share a tile's second operand, 1 or 2.
    """

    columns: int = 256
    stages: int = 4
    cluster: int = 2


def matmul_config(columns: int, rows_per_group: float) -> MatmulConfig:
    """Block sizes of the product with x or of its gradient in x.

    Args:
        columns: of the result.
        rows_per_group: on average.
    """
    if columns <= 64:
        return MatmulConfig(64, stages=8, cluster=1)
    # Two blocks share a tile of 256 rows; of a small group more of it lies behind the group's end.
    return MatmulConfig(cluster=2 if rows_per_group > 1024 else 1)


def dw_config(columns: int, result_bytes: int) -> MatmulConfig:
    """Block sizes of the gradient of the matrices.

    Args:
        columns: of dy.
        result_bytes: of an element; with float32 the tiles on their way out take the place of a stage or two.
    """
    wide = result_bytes > 2
    if columns <= 64:
        return MatmulConfig(64, stages=6 if wide else 8, cluster=1)
    return MatmulConfig(stages=3 if wide else 4)


class TritonConfig(NamedTuple):
    """Block sizes of a product in Pallas-Triton.

    Attributes:
        rows: of a program's tile; of dw's, columns of dy.
        columns: of a program's tile.
        terms: of a sum that are multiplied at a time.
        num_warps: warps of a program.
        num_stages: pieces of the sum in flight.
    """

    rows: int = 128
    columns: int = 128
    terms: int = 32
    num_warps: int = 4
    num_stages: int = 3


def triton_config(rows_per_group: float) -> TritonConfig:
    """Block sizes of the product with x or of its gradient in x, by the average number of a group's rows.

    The number of rows is the smallest that most groups fit in: a tile costs the same however many of its rows are the
    group's own.
    """
    if rows_per_group > 64:
        return TritonConfig()
    return TritonConfig(rows=64 if rows_per_group > 24 else 32, columns=64, terms=64)


def triton_dw_config() -> TritonConfig:
    """Block sizes of the gradient of the matrices."""
    return TritonConfig()


class NF4Config(NamedTuple):
    """Block sizes of a product that decodes NF4 as it multiplies.

    Attributes:
        rows: of a program's tile.
        out: rows of the matrix at a time: columns of the tile, or in the gradient terms of the sum.
        blocks: of 64 columns of each: terms of the sum, or in the gradient columns of the tile.
        num_warps: warps of a program.
        num_stages: pieces of the sum in flight.
    """

    rows: int = 16
    out: int = 128
    blocks: int = 1
    num_warps: int = 4
    num_stages: int = 3


#: Most rows of a group, on average, for which decoding inside the product is preferred to decoding first.
NF4_MOST_ROWS = 64


def nf4_config(rows_per_group: float, gradient: bool) -> NF4Config:
    """Block sizes by the average number of a group's rows: every tile of its rows decodes the matrix once more."""
    rows = 16 if rows_per_group <= 6 else 32 if rows_per_group <= 18 else 64
    return NF4Config(rows, out=64, blocks=2) if gradient else NF4Config(rows)
