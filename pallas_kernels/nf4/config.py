"""Block sizes of the dequantisation kernels, as measured on an H200 (docs/performance.md)."""

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    """How a Triton program works.

    Attributes:
        blocks: blocks of 64 elements that it decodes.
        num_warps: its warps.
    """

    blocks: int
    num_warps: int


@dataclasses.dataclass(frozen=True)
class MosaicConfig:
    """How a Mosaic thread block (one warpgroup) works.

    Attributes:
        bytes_per_thread: consecutive codes of a block that a thread decodes at once: 4, 8 or 16 bytes.
        blocks: blocks of 64 elements that the thread block decodes; a multiple of 4 · bytes_per_thread.
    """

    bytes_per_thread: int
    blocks: int


def triton_config(dtype: DTypeLike) -> TritonConfig:
    """16 bytes of codes a thread for 16-bit results, 4 for float32: its registers hold four times the planes."""
    return TritonConfig(blocks=64 if jnp.dtype(dtype).itemsize == 2 else 16, num_warps=4)


def mosaic_config(dtype: DTypeLike) -> MosaicConfig:
    """The codes that make one 16-byte store of each half a thread, and the smallest tile, which serves most shapes."""
    bytes_per_thread = 16 // jnp.dtype(dtype).itemsize
    return MosaicConfig(bytes_per_thread=bytes_per_thread, blocks=4 * bytes_per_thread)
