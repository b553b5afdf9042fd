"""Block sizes of Hopper's kernels and the rule that chooses them."""

from typing import NamedTuple

#: Terms of a piece of a sum, and the multiple that every summed or written dimension is padded to.
TERMS = 64
#: Rows of the tile of one thread block, half of them each multiplying warpgroup's.
ROWS = 128


class MatmulConfig(NamedTuple):
    """Block sizes of a product.

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
