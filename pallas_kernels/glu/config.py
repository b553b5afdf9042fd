"""Block sizes of the Triton kernels, and what these serve."""

import dataclasses

#: Every tile size below divides it.
TILE = 64

#: A tile's width is a power of two, and a matrix instruction at least 16 deep.
RANKS = (16, 32, 64, 128)

#: Those that Pallas-Triton can lower; it has no error function.
ACTIVATIONS = ("silu", "swish", "gelu_tanh", "gelu_pytorch_tanh", "gelu_new", "relu")


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How a program works.

    Attributes:
        rows: tokens of a tile.
        columns: features of gate, and as many of up, in a tile.
        loop: tiles that a program goes over at most: features in the forward kernel, tokens in the backward one.
        num_warps: its warps.
        num_stages: tiles that the loop has in flight.
    """

    rows: int
    columns: int
    loop: int
    num_warps: int
    num_stages: int


def forward_config(rank: int) -> Tiles:
    """For adapters of a (padded) rank."""
    del rank
    return Tiles(rows=64, columns=64, loop=8, num_warps=4, num_stages=2)


def backward_config(rank: int) -> Tiles:
    """For adapters of a (padded) rank: a long loop where the partial sums are wide."""
    return Tiles(rows=64, columns=64, loop=16 if rank <= 32 else 32, num_warps=8, num_stages=2)
