"""Block sizes of the Hopper kernels."""

import dataclasses

from pallas_kernels.attention.options import Options

PRODUCER_REGISTERS = 24
CONSUMER_REGISTERS = 240
"""A thread's registers in the warpgroup that loads and in the two that compute: together a multiprocessor's 65,536."""


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """Block sizes of the forward kernel.

    Attributes:
        block_kv: keys multiplied at once, a multiple of 64.
        stages: blocks of keys and of values in shared memory.
        buffers: tiles of queries in shared memory.
        heads: query heads of a tile: 1, with 64 of its 128 queries for each warpgroup, or 2 that share their keys, with
            one head and the same 64 queries for each.
        overlap: whether the product with a block's values runs beside that with the next block's keys.
        pingpong: whether the two warpgroups are kept out of phase.
        own_output: whether the output has shared memory of its own, so that the next queries are loaded early.
    """

    block_kv: int = 128
    stages: int = 2
    buffers: int = 1
    heads: int = 1
    overlap: bool = True
    pingpong: bool = True
    own_output: bool = True


@dataclasses.dataclass(frozen=True)
class DqConfig:
    """Block sizes of the kernel for dq.

    Attributes:
        block_kv: keys multiplied at once; 32, or a multiple of 64.
        stages: blocks of keys and of values in shared memory.
        buffers: tiles of queries in shared memory; with more than 1 a thread block takes several tiles in turn.
        heads: as in `ForwardConfig`.
        lag: whether a block's last product is waited for in the next block.
    """

    block_kv: int = 128
    stages: int = 2
    buffers: int = 1
    heads: int = 1
    lag: bool = False


@dataclasses.dataclass(frozen=True)
class DkvConfig:
    """Block sizes of the kernel for dk and dv.

    Attributes:
        block_q: queries multiplied at once; 32, or a multiple of 64.
        stages: blocks of queries in shared memory.
        buffers: tiles of keys in shared memory; with more than 1 a thread block takes several tiles in turn.
        split: whether one warpgroup computes dk and the other dv of the same 64 keys, where both do not fit into
            registers, instead of both of 64 keys each.
    """

    block_q: int = 64
    stages: int = 3
    buffers: int = 1
    split: bool = False


def forward_config(size: int, value_size: int, options: Options, *, documents: bool, grouped: bool) -> ForwardConfig:
    """Block sizes without a measurement: the largest that leave registers for the options.

    Args:
        size: D.
        value_size: Dv.
        options: of the call.
        documents: whether there are documents; they are short, so tiles are prepared beforehand.
        grouped: whether each key head has an even number of query heads.
    """
    largest = max(size, value_size)
    if largest > 128 or options.dropout_rate:
        return ForwardConfig(block_kv=64, stages=2 if largest > 128 else 4, own_output=largest <= 192)
    if documents:
        return ForwardConfig(64, 4, buffers=2, heads=2 if grouped else 1, pingpong=grouped, own_output=False)
    return ForwardConfig(stages=4 if largest <= 64 else 2)


def dq_config(size: int, value_size: int, options: Options, *, documents: bool, grouped: bool) -> DqConfig:
    """Block sizes likewise."""
    largest = max(size, value_size)
    if largest > 192 or (largest > 128 and options.dropout_rate):
        return DqConfig(block_kv=32, stages=2)
    if largest > 128:
        return DqConfig(block_kv=64, stages=2)
    if documents:
        return DqConfig(32 if options.dropout_rate else 64, stages=2, buffers=2, heads=2 if grouped else 1)
    if options.sliding_window or options.dropout_rate or options.logits_soft_cap:
        return DqConfig(block_kv=64, stages=4)
    return DqConfig(stages=4 if largest <= 64 else 2)


def dkv_config(size: int, value_size: int, options: Options) -> DkvConfig:
    """Block sizes likewise."""
    together = size + value_size
    narrow = bool(options.dropout_rate or options.logits_soft_cap)
    if together > 256:
        return DkvConfig(block_q=32 if together > 384 or narrow else 64, stages=2, split=True)
    return DkvConfig(block_q=32 if narrow else 64, stages=4)
