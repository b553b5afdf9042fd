"""Block sizes of the kernels and where they take over, as measured on an H200 (docs/performance.md)."""

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


@dataclasses.dataclass(frozen=True)
class FewTokensConfig:
    """How the product with few rows of x works.

    Attributes:
        warpgroups: of a thread block; they share the columns of its rows.
        row_tiles: rows of W that a thread block takes, in 32.
        stages: pieces of x in shared memory, for each warpgroup.
        ahead: pieces of W that a thread has under way in registers.
    """

    warpgroups: int = 2
    row_tiles: int = 1
    stages: int = 2
    ahead: int = 1

    @property
    def rows(self) -> int:
        """Rows of W that a thread block takes."""
        return 32 * self.row_tiles


@dataclasses.dataclass(frozen=True)
class FusedConfig:
    """How the product with many rows of x, or its gradient, works.

    Attributes:
        rows: of x in a tile: 64, 128 or 256.
        columns: of the result in a tile: 64 or 128.
        parts: in how many equal parts each tile's sum is cut, if there are thread blocks for all; None cuts tiles where
            it takes to give every thread block as many steps.
        x_stages: pieces of x in shared memory.
        w_stages: decoded pieces of W in shared memory.
        ahead: pieces of W that a decoding thread has under way in registers.
        consumer_registers: of a thread that multiplies.
        decoder_registers: of a thread that decodes.
    """

    rows: int = 256
    columns: int = 128
    parts: int | None = None
    x_stages: int = 4
    w_stages: int = 3
    ahead: int = 2
    consumer_registers: int = 160
    decoder_registers: int = 64

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply."""
        return 1 if self.rows == 64 else 2


@dataclasses.dataclass(frozen=True)
class RegistersConfig:
    """How the product with many rows of x, or its gradient, works whose decoded weights stay in registers.

    Attributes:
        rows: of x in a tile: 64, 128 or 256.
        cluster: thread blocks that share x, each with 128 columns of the result: 1 or 2.
        parts: as in `FusedConfig`, of clusters.
        x_stages: pieces of x in shared memory, of 64 columns.
        w_stages: pieces of codes in shared memory, of 128 columns.
    """

    rows: int = 256
    cluster: int = 2
    parts: int | None = None
    x_stages: int = 4
    w_stages: int = 3

    @property
    def columns(self) -> int:
        """Of the result, in a cluster's tile."""
        return 128 * self.cluster


def triton_config(dtype: DTypeLike) -> TritonConfig:
    """16 bytes of codes a thread for 16-bit results, 4 for float32: its registers hold four times the planes."""
    return TritonConfig(blocks=64 if jnp.dtype(dtype).itemsize == 2 else 16, num_warps=4)


def mosaic_config(dtype: DTypeLike) -> MosaicConfig:
    """The codes that make one 16-byte store of each half a thread, and the smallest tile, which serves most shapes."""
    bytes_per_thread = 16 // jnp.dtype(dtype).itemsize
    return MosaicConfig(bytes_per_thread=bytes_per_thread, blocks=4 * bytes_per_thread)


FEW_TOKENS_ROWS = 32
"""Up to so many rows of x the product goes to the kernel that is bound by the packed bytes."""
FEW_TOKENS_COLUMNS = 512
"""`in` is a multiple of it there."""
REGISTERS_ROWS = 65
"""From so many rows on, decoded weights stay in registers, if the matrix suits (`suits_registers`)."""
REGISTERS_GRAIN = 256
"""`in` is a multiple of it there: a row of scales is then a multiple of 16 bytes, as TMA takes them."""
REGISTERS_TERMS = 128
"""Of the sum, in a step: `out` is a multiple of it in the gradient."""
_MOST_ROWS, _MOST_ROWS_FORWARD = 512, 1024
"""Up to so many rows products decode as they multiply, and those forward by registers; above, they decode first."""
_EQUAL_STEPS, _CUT_STEPS = 6, 9
"""What handing sums on and adding them up costs, in steps of REGISTERS_TERMS: with tiles in equal parts, where every
cluster does one of the two, and where most do both."""


def product_config(
    rows: int, shape: tuple[int, int], gradient: bool, cores: int
) -> FewTokensConfig | FusedConfig | RegistersConfig:
    """Which of the kernels that decode as they multiply serves, and with what block sizes.

    Args:
        rows: of x.
        shape: (out, in) of the matrix, multiples of 64 from 128 on.
        gradient: whether x is multiplied with the matrix as it is.
        cores: multiprocessors.
    """
    out, columns = shape
    few = few_tokens_config(rows, shape)
    if not gradient and rows <= FEW_TOKENS_ROWS and columns % FEW_TOKENS_COLUMNS == 0 and out >= few.rows:
        return few
    if rows >= REGISTERS_ROWS and suits_registers(shape, gradient):
        return registers_config(rows, shape, gradient, cores)
    return fused_config(rows, columns if gradient else out, cores)


def most_rows(shape: tuple[int, int], gradient: bool) -> int:
    """Up to so many rows `product_config`'s kernels are faster than decoding first."""
    return _MOST_ROWS_FORWARD if suits_registers(shape, gradient) and not gradient else _MOST_ROWS


def suits_registers(shape: tuple[int, int], gradient: bool) -> bool:
    """Whether the kernel that keeps decoded weights in registers takes a matrix."""
    summed, written = shape if gradient else shape[::-1]
    whole = shape[1] % REGISTERS_GRAIN == 0 and summed % REGISTERS_TERMS == 0
    return whole and written >= _registers(gradient).columns


def few_tokens_config(rows: int, shape: tuple[int, int]) -> FewTokensConfig:
    """Warpgroups that fill the multiprocessors twice and more and leave each some eight steps or more."""
    if shape[0] >= 8192:
        return FewTokensConfig(warpgroups=1)
    return FewTokensConfig(warpgroups=2, ahead=1 if rows <= 16 else 2)


def registers_config(rows: int, shape: tuple[int, int], gradient: bool, cores: int) -> RegistersConfig:
    """The least rows that hold all of x, up to 256; tiles cut in the way that takes the fewest steps."""
    summed, written = shape if gradient else shape[::-1]
    sizes = dataclasses.replace(_registers(gradient), rows=128 if rows <= 128 else 256)
    clusters, steps = cores // sizes.cluster, -(-summed // REGISTERS_TERMS)
    tiles = -(-rows // sizes.rows) * -(-written // sizes.columns)
    costs = {1: -(-tiles // clusters) * steps, None: tiles * steps / clusters + _CUT_STEPS}
    if parts := clusters // tiles:
        costs |= {parts: -(-steps // parts) + (_EQUAL_STEPS if parts > 1 else 0)}
    return dataclasses.replace(sizes, parts=min(costs, key=costs.__getitem__))


def _registers(gradient: bool) -> RegistersConfig:
    """As measured, x shared by two thread blocks gains 4% in the product and loses 1 to 4% in the gradient."""
    return RegistersConfig(cluster=1 if gradient else 2)


def fused_config(rows: int, columns: int, cores: int) -> FusedConfig:
    """The least rows that hold all of x, up to 256; fewer sums in registers leave more to the decoding threads.

    Args:
        rows: of x.
        columns: of the result.
        cores: multiprocessors.
    """
    if rows <= 64:
        return FusedConfig(rows=64, consumer_registers=112, decoder_registers=168)
    if rows <= 128:
        return FusedConfig(rows=128, consumer_registers=112, decoder_registers=112)
    # One round of whole tiles that keeps most multiprocessors busy beats cutting them.
    tiles = -(-rows // 256) * -(-columns // 128)
    return FusedConfig(w_stages=2, parts=1 if 0.8 * cores <= tiles <= cores else None)
