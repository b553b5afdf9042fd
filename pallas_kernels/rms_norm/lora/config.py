"""Block sizes of the Triton kernel."""

from pallas_kernels.tiles import Tiles


def backward_config(capability: tuple[int, int], rank: int) -> Tiles:
    """Block sizes by compute capability and rank."""
    if capability < (9, 0):
        return Tiles(rows=16, columns=64, loop=16, num_warps=4, num_stages=2)
    # as measured on an H200 for ranks 32 and 64; twice the warps hold the sums of rank 128
    return Tiles(rows=64, columns=64, loop=32, num_warps=4 if rank <= 64 else 8, num_stages=3)


def products_config(rank: int) -> Tiles:
    """Block sizes of the rank products, features along the loop; as measured on an H100 for rank 32."""
    return Tiles(rows=64, columns=128 if rank <= 64 else 64, loop=16, num_warps=4, num_stages=3)
