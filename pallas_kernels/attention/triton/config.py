"""Block sizes of the Triton kernels."""

import dataclasses

from pallas_kernels import dispatch
from pallas_kernels.attention.call import Options
from pallas_kernels.attention.triton.loads import padded


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Block sizes of one kernel.

    Attributes:
        queries: queries of a tile, a power of two, at least 16.
        keys: keys of a tile, the same.
        num_warps: warps of a program.
        num_stages: tiles in flight.
    """

    queries: int
    keys: int
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    """Block sizes of the three kernels.

    Attributes:
        forward: a program owns a tile of queries and loops over keys.
        dkv: a program owns a tile of keys and loops over queries.
        dq: a program owns a tile of queries and loops over keys.
    """

    forward: Tiles
    dkv: Tiles
    dq: Tiles


# By head size, padded to a power of two. From Hopper on a block has 227 KiB of shared memory and matrix instructions
# for 64 rows of four warps; elsewhere 99 KiB have to do (Ada, consumer Ampere), and two warps more hide latency.
_LARGE = {
    64: TritonConfig(forward=Tiles(128, 128, 8, 2), dkv=Tiles(64, 128, 8, 2), dq=Tiles(128, 128, 8, 2)),
    128: TritonConfig(forward=Tiles(128, 128, 8, 2), dkv=Tiles(64, 128, 8, 2), dq=Tiles(128, 64, 8, 3)),
    256: TritonConfig(forward=Tiles(128, 64, 8, 2), dkv=Tiles(32, 64, 8, 2), dq=Tiles(128, 32, 8, 2)),
}
_SMALL = {
    64: TritonConfig(forward=Tiles(128, 64, 8, 2), dkv=Tiles(64, 128, 8, 2), dq=Tiles(128, 64, 8, 2)),
    128: TritonConfig(forward=Tiles(128, 64, 8, 2), dkv=Tiles(64, 64, 8, 2), dq=Tiles(64, 64, 8, 2)),
    256: TritonConfig(forward=Tiles(64, 32, 8, 2), dkv=Tiles(32, 32, 4, 2), dq=Tiles(32, 32, 4, 2)),
}


def triton_config(size: int, value_size: int, options: Options) -> TritonConfig:
    """The block sizes for a call on the target: the largest whose programs keep everything in registers.

    Args:
        size: D of queries and keys.
        value_size: D of values.
        options: the call's. A cap or dropout takes registers for each logit: tiles of half as many columns.
    """
    capability = dispatch.target().compute_capability
    large = capability is not None and (9, 0) <= capability < (12, 0)
    config = (_LARGE if large else _SMALL)[max(64, padded(size), padded(value_size))]
    if options.logits_soft_cap is None and options.dropout_rate == 0.0:
        return config
    return TritonConfig(
        forward=dataclasses.replace(config.forward, keys=config.forward.keys // 2),
        dkv=dataclasses.replace(config.dkv, queries=config.dkv.queries // 2),
        dq=dataclasses.replace(config.dq, keys=config.dq.keys // 2),
    )
