"""Block sizes of the Triton kernels."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How one kernel works.

    Attributes:
        queries: queries of a tile, a power of two, at least 16.
        keys: keys of a tile likewise.
        num_warps: warps of a program.
        num_stages: tiles that the loop has in flight.
    """

    queries: int
    keys: int
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    """How the three kernels work.

    Attributes:
        forward: a program owns a tile of queries and loops over keys.
        dkv: a program owns a tile of keys and loops over queries.
        dq: a program owns a tile of queries and loops over keys.
    """

    forward: Tiles
    dkv: Tiles
    dq: Tiles


def triton_config(size: int, value_size: int, capability: tuple[int, int] | None) -> TritonConfig:
    """The block sizes for a call.

    Args:
        size: D of queries and keys.
        value_size: D of values.
        capability: compute capability; None as for the smallest one.
    """
    del size, value_size, capability
    return TritonConfig(
        forward=Tiles(128, 64, num_warps=8, num_stages=2),
        dkv=Tiles(64, 128, num_warps=8, num_stages=2),
        dq=Tiles(128, 64, num_warps=8, num_stages=2),
    )
