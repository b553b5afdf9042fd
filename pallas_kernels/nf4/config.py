"""Block sizes of the kernels and the sizes at which they take over, as measured on an H200 (docs/lab/nf4.md)."""

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True)
class MatvecConfig:
    """Block sizes of the product with few rows of x.

    Attributes:
        warpgroups: of a thread block; they share the columns of its rows.
        ahead: pieces of W that a thread loads in advance, in registers.
    """

    warpgroups: int = 2
    ahead: int = 1


@dataclasses.dataclass(frozen=True)
class MatmulRsConfig:
    """Block sizes of the register-operand (wgmma RS) matmul and its gradient.

    Attributes:
        rows: of x in a tile: 64, 128 or 256.
        cluster: thread blocks that share x, each with 128 columns of the result: 1 or 2.
        splits: equal parts that each tile's sum is cut into (fixed-split; 1: data-parallel), if there are clusters for
            all; None: Stream-K, the same number of iterations for every cluster.
    """

    rows: int = 256
    cluster: int = 2
    splits: int | None = None

    @property
    def columns(self) -> int:
        """Columns of the result in a cluster's tile."""
        return 128 * self.cluster


def triton_blocks(dtype: DTypeLike) -> int:
    """Blocks of 64 elements a program of the Triton dequantisation, four warps: 16 bytes of codes a thread.

    Of float32 it is 4: a thread's registers hold four times the planes.
    """
    return 16 if jnp.dtype(dtype).itemsize == 4 else 64


TRANSPOSED_ROWS = (256, 128, 64)
"""Rows of a tile of the transposing dequantisation, 64 a warp; the largest that divide the matrix's first."""


def transposed_rows(out: int) -> int | None:
    """The largest tile of rows that divides a matrix of `out` rows; None: none does."""
    return next((rows for rows in TRANSPOSED_ROWS if out % rows == 0), None)


def mosaic_blocks(dtype: DTypeLike) -> int:
    """Blocks of a warpgroup of the Mosaic dequantisation: the codes that make one 16-byte store of each half a thread.

    A fourth of it are a thread's bytes of codes. Larger tiles are no faster, and this one serves most shapes.
    """
    return 64 // jnp.dtype(dtype).itemsize


MATVEC_ROWS = 32
"""Most rows of x for `matvec`."""
MATVEC_COLUMNS = 512
"""`in` is a multiple of it for `matvec`."""
RS_GRAIN = 256
"""`in` is a multiple of it for `matmul_rs`: a row of scales is then a multiple of 16 bytes, as TMA requires."""
RS_TERMS = 128
"""Terms of the sum in an iteration of `matmul_rs`: `out` is a multiple of it in the gradient."""
_MOST_ROWS, _MOST_ROWS_FORWARD = 512, 1024
"""Most rows of x for which decoding inside the product is faster than before it."""
_SPLIT_COST, _STREAM_COST = 6, 9
"""Cost of storing partial sums and of the fix-up, in iterations of RS_TERMS: with equal splits every cluster does one
of the two, with Stream-K most do both."""


def product_config(
    rows: int, shape: tuple[int, int], gradient: bool, cores: int
) -> MatvecConfig | MatmulRsConfig | None:
    """The kernel that decodes as it multiplies, by the type of its block sizes; None: none takes the matrix.

    Args:
        rows: of x.
        shape: (out, in) of the matrix, multiples of 64 from 128 on.
        gradient: x W instead of x Wᵀ.
        cores: multiprocessors.
    """
    summed, written = shape if gradient else shape[::-1]
    if not gradient and rows <= MATVEC_ROWS and summed % MATVEC_COLUMNS == 0:
        return matvec_config(rows, shape)
    if shape[1] % RS_GRAIN == 0 and summed % RS_TERMS == 0 and written >= _rs(gradient).columns:
        return matmul_rs_config(rows, shape, gradient, cores)
    return None


def most_rows(gradient: bool) -> int:
    """Most rows of x for which `product_config`'s kernels are faster than decoding first."""
    return _MOST_ROWS if gradient else _MOST_ROWS_FORWARD


def matvec_config(rows: int, shape: tuple[int, int]) -> MatvecConfig:
    """Warpgroups that fill the multiprocessors at least twice and leave each about eight pieces of W or more."""
    if shape[0] >= 8192:
        return MatvecConfig(warpgroups=1)
    return MatvecConfig(warpgroups=2, ahead=1 if rows <= 16 else 2)


def matmul_rs_config(rows: int, shape: tuple[int, int], gradient: bool, cores: int) -> MatmulRsConfig:
    """The fewest rows that hold all of x, up to 256; the decomposition with the fewest iterations a cluster."""
    summed, written = shape if gradient else shape[::-1]
    sizes = dataclasses.replace(_rs(gradient), rows=64 if rows <= 64 else 128 if rows <= 128 else 256)
    clusters, iterations = cores // sizes.cluster, -(-summed // RS_TERMS)
    tiles = -(-rows // sizes.rows) * -(-written // sizes.columns)
    costs = {1: -(-tiles // clusters) * iterations, None: tiles * iterations / clusters + _STREAM_COST}
    if splits := clusters // tiles:
        costs |= {splits: -(-iterations // splits) + (_SPLIT_COST if splits > 1 else 0)}
    return dataclasses.replace(sizes, splits=min(costs, key=costs.__getitem__))


def _rs(gradient: bool) -> MatmulRsConfig:
    """As measured, x shared by two thread blocks gains 4% in the product and loses 1 to 4% in the gradient."""
    return MatmulRsConfig(cluster=1 if gradient else 2)
