"""Block sizes of the Triton kernels, and the ranks and activations that they serve."""

from pallas_kernels.tiles import Tiles

#: Every tile size below divides it.
TILE = 64

#: Activations that Pallas-Triton can lower; it has no error function.
ACTIVATIONS = ("silu", "swish", "gelu_tanh", "gelu_pytorch_tanh", "gelu_new", "relu")


def forward_config(capability: tuple[int, int], rank: int) -> Tiles:
    """Block sizes by compute capability and largest rank, as measured on an H200 for ranks 16 and 64.

    With a loop of 28 the programs of 8B's width fill the card in whole waves.
    """
    if capability < (9, 0):
        return Tiles(rows=32, columns=64, loop=8, num_warps=4, num_stages=2)
    if rank <= 32:
        return Tiles(rows=64, columns=64, loop=28, num_warps=4, num_stages=3)
    if rank <= 64:
        return Tiles(rows=32, columns=64, loop=16, num_warps=4, num_stages=2)
    return Tiles(rows=64, columns=32, loop=16, num_warps=4, num_stages=2)


def backward_config(capability: tuple[int, int], rank: int) -> Tiles:
    """Block sizes with a long loop, since every program writes partial sums; few warps hold many sums."""
    if capability < (9, 0):
        return Tiles(rows=32, columns=32, loop=32, num_warps=8, num_stages=2)
    if rank <= 64:
        return Tiles(rows=32, columns=64, loop=32, num_warps=4, num_stages=3)
    return Tiles(rows=32, columns=64, loop=32, num_warps=8, num_stages=2)


def largest_rank(capability: tuple[int, int]) -> int:
    """The largest rank whose sums the backward kernel keeps in registers."""
    return 128 if capability >= (9, 0) else 64
