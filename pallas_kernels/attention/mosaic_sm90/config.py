"""Block sizes of the Hopper kernels."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.attention.call import Options

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
        pingpong: whether the two warpgroups are kept out of phase.
        own_output: whether the output has shared memory of its own, so that the next queries are loaded early.
    """

    block_kv: int = 128
    stages: int = 2
    buffers: int = 1
    heads: int = 1
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
    """

    block_kv: int = 128
    stages: int = 2
    buffers: int = 1
    heads: int = 1


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


class CallFacts(NamedTuple):
    """The facts of a call that decide its block sizes.

    Attributes:
        dtype: of q, k and v.
        size: D.
        value_size: Dv.
        options: of the call.
        documents: whether there are documents; they are short, so tiles are prepared beforehand.
        grouped: whether each key head has an even number of query heads.
    """

    dtype: DTypeLike
    size: int
    value_size: int
    options: Options
    documents: bool
    grouped: bool

    @property
    def measured(self) -> tuple[int, str] | None:
        """The key of the tables below: D, and what the call has beside causality; None: no such call was measured."""
        features = {
            "documents": self.documents,
            "window": self.options.sliding_window is not None,
            "cap": self.options.logits_soft_cap is not None,
            "dropout": self.options.dropout_rate > 0.0,
        }
        present = [name for name, there in features.items() if there]
        plain = self.options.causal and self.grouped and self.size == self.value_size and len(present) <= 1
        return (self.size, *(present or ["nothing"])) if plain and self.dtype == jnp.bfloat16 else None  # pyright: ignore[reportReturnType]


# Measured on an H200 (docs/lab/attention.md).
_FORWARD = {(128, "documents"): ForwardConfig(heads=2), (128, "window"): ForwardConfig(buffers=2, heads=2)}
_DQ = {(64, "nothing"): DqConfig(stages=4, buffers=2, heads=2)} | dict.fromkeys(
    ((128, "nothing"), (128, "cap"), (128, "window")), DqConfig(block_kv=64, stages=3, buffers=2, heads=2)
)
_DKV = {(64, "nothing"): DkvConfig(block_q=128, stages=2), (128, "cap"): DkvConfig(stages=2)}


def forward_config(call: CallFacts) -> ForwardConfig:
    """Block sizes as measured; without a measurement the largest that leave registers for the options."""
    if call.measured in _FORWARD:
        return _FORWARD[call.measured]
    largest = max(call.size, call.value_size)
    if largest > 128 or call.options.dropout_rate:
        return ForwardConfig(block_kv=64, stages=2 if largest > 128 else 4, own_output=largest <= 192)
    if call.documents:
        heads = 2 if call.grouped else 1
        return ForwardConfig(64, 4, buffers=2, heads=heads, pingpong=call.grouped, own_output=False)
    return ForwardConfig(stages=4 if largest <= 64 else 2)


def dq_config(call: CallFacts) -> DqConfig:
    """Block sizes of dq's kernel, chosen as `forward_config` does."""
    if call.measured in _DQ:
        return _DQ[call.measured]
    largest, options = max(call.size, call.value_size), call.options
    if largest > 192 or (largest > 128 and options.dropout_rate):
        return DqConfig(block_kv=32, stages=2)
    if largest > 128:
        return DqConfig(block_kv=64, stages=2)
    if call.documents:
        return DqConfig(32 if options.dropout_rate else 64, stages=2, buffers=2, heads=2 if call.grouped else 1)
    if options.sliding_window or options.dropout_rate or options.logits_soft_cap:
        return DqConfig(block_kv=64, stages=4)
    return DqConfig(stages=4 if largest <= 64 else 2)


def dkv_config(call: CallFacts) -> DkvConfig:
    """Block sizes of the kernel for dk and dv, chosen as `forward_config` does."""
    if call.measured in _DKV:
        return _DKV[call.measured]
    together, options = call.size + call.value_size, call.options
    narrow = bool(options.dropout_rate or options.logits_soft_cap)
    if together > 256:
        return DkvConfig(block_q=32 if together > 384 or narrow else 64, stages=2, split=True)
    return DkvConfig(block_q=32 if narrow else 64, stages=4)
