"""Block sizes of the Hopper kernels, and which are taken."""

import dataclasses

PRODUCER_REGISTERS = 24
CONSUMER_REGISTERS = 240
"""A thread's registers in the warpgroup that loads and in the two that compute: together a multiprocessor's 65,536."""


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """Block sizes of the forward kernel.

    Attributes:
        block_kv: keys multiplied at once, a multiple of 64.
        stages: blocks of keys and of values in shared memory.
        overlap: whether a warpgroup multiplies with the values of one block and the keys of the next at the same time.
        pingpong: whether the two warpgroups are kept out of phase.
        own_output: whether the output has shared memory of its own, so that the next queries can be loaded early.
    """

    block_kv: int = 128
    stages: int = 2
    overlap: bool = True
    pingpong: bool = True
    own_output: bool = True


@dataclasses.dataclass(frozen=True)
class DqConfig:
    """Block sizes of the kernel for dq.

    Attributes:
        block_kv: keys multiplied at once; 32, or a multiple of 64.
        stages: blocks of keys and of values in shared memory.
        lag: whether a block's last product is waited for in the next block.
    """

    block_kv: int = 128
    stages: int = 2
    lag: bool = False


@dataclasses.dataclass(frozen=True)
class DkvConfig:
    """Block sizes of the kernel for dk and dv.

    Attributes:
        block_q: queries multiplied at once; 32, or a multiple of 64.
        stages: blocks of queries in shared memory.
        split: whether one warpgroup computes dk and the other dv of the same 64 keys, where both do not fit into
            registers, instead of both of 64 keys each.
    """

    block_q: int = 64
    stages: int = 3
    split: bool = False


def forward_config(size: int, value_size: int) -> ForwardConfig:
    """Block sizes for heads of D and Dv."""
    largest = max(size, value_size)
    if largest <= 64:
        return ForwardConfig(stages=4)
    if largest <= 128:
        return ForwardConfig()
    return ForwardConfig(block_kv=64, own_output=largest <= 192)


def dq_config(size: int, value_size: int) -> DqConfig:
    """Block sizes for heads of D and Dv."""
    largest = max(size, value_size)
    if largest <= 64:
        return DqConfig(stages=4)
    if largest <= 128:
        return DqConfig()
    return DqConfig(block_kv=64 if largest <= 192 else 32)


def dkv_config(size: int, value_size: int) -> DkvConfig:
    """Block sizes for heads of D and Dv."""
    if size + value_size <= 256:
        return DkvConfig(stages=4 if size + value_size <= 128 else 3)
    return DkvConfig(stages=2, split=True)
