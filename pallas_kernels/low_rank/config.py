"""Block sizes of the Triton kernels."""

from pallas_kernels.tiles import Tiles

#: Every tile size below divides it.
TILE = 64

#: Partial sums of the products' gradient are as large as R / 16 quarters of dy, and are written and read.
LARGEST_OUTPUT_RANK = 32


def add_config(rank: int) -> Tiles:
    """Block sizes of the sum by rank, as measured on an H200 for rank 16."""
    return Tiles(rows=32, columns=128 if rank <= 32 else 64, loop=1, num_warps=4, num_stages=1)


def output_config(capability: tuple[int, int]) -> Tiles:
    """Block sizes of the gradients behind B; partial sums are fewer with wide tiles and long loops."""
    if capability < (9, 0):
        return Tiles(rows=32, columns=128, loop=16, num_warps=4, num_stages=2)
    return Tiles(rows=64, columns=128, loop=16, num_warps=4, num_stages=4)


def round_config(rank: int) -> Tiles:
    """Block sizes of rounding with products, features along the loop; as measured on an H100 for rank 16."""
    return Tiles(rows=64, columns=128 if rank <= 64 else 64, loop=14, num_warps=4, num_stages=3)


def input_config(capability: tuple[int, int], rank: int) -> Tiles:
    """Block sizes of the gradients behind A; few warps hold many sums."""
    if capability < (9, 0):
        return Tiles(rows=32, columns=64, loop=16, num_warps=4, num_stages=2)
    return Tiles(rows=32, columns=128 if rank <= 64 else 64, loop=16 if rank <= 32 else 32, num_warps=4, num_stages=3)
