"""Block sizes of the dequantisation kernels."""

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    """How a Triton program works.

    Attributes:
        blocks: blocks of 64 elements decoded at once.
        steps: how many times that in one program; all loads come first.
        num_warps: warps of a program.
    """

    blocks: int
    steps: int
    num_warps: int


@dataclasses.dataclass(frozen=True)
class MosaicConfig:
    """How a Mosaic thread block (one warpgroup) works.

    Attributes:
        bytes_per_thread: consecutive codes of a block that a thread decodes: 4, 8 or 16 bytes.
        blocks: blocks of 64 elements that a thread block decodes at once.
        stages: tiles in flight of the pipelined form; 0 for the direct form, which has no shared memory.
        blocks_per_core: thread blocks on a multiprocessor, of the pipelined form.
    """

    bytes_per_thread: int
    blocks: int
    stages: int = 0
    blocks_per_core: int = 2


def bytes_per_thread(dtype: DTypeLike) -> int:
    """Codes that make one 16-byte store of each half."""
    return 16 // jnp.dtype(dtype).itemsize


def triton_config(dtype: DTypeLike) -> TritonConfig:
    """Four warps; each thread loads the codes that make one 16-byte store of each half."""
    return TritonConfig(blocks=128 * bytes_per_thread(dtype) // 32, steps=1, num_warps=4)


def mosaic_config(dtype: DTypeLike) -> MosaicConfig:
    """A warpgroup of such threads."""
    bytes_ = bytes_per_thread(dtype)
    return MosaicConfig(bytes_per_thread=bytes_, blocks=128 * bytes_ // 32)
