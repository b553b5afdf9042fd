"""Block sizes of the kernels and the sizes at which they take over, as measured on an H200 (docs/lab/nf4.md)."""

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True)
class MatvecConfig:
    """Block sizes of the product with few rows of x.

    Attributes:
        tiles: of 16 rows of W, that a warp multiplies with the same elements of x.
        row_warps: warps below each other along the rows of W, a power of two; the others lie along the columns.
        blocks: of 64 columns that a warp takes of a stage.
        stages: pieces of W and x in shared memory.
        warps: of a thread block, a power of two.
        splits: equal parts that each tile's sum is cut into; several give addends of the product.
        rounds: in which the warps of the same rows hand on their sums, for less of shared memory.
    """

    tiles: int = 2
    row_warps: int = 1
    blocks: int = 2
    stages: int = 3
    warps: int = 8
    splits: int = 1
    rounds: int = 1

    @property
    def column_warps(self) -> int:
        """Warps side by side along the columns."""
        return self.warps // self.row_warps

    @property
    def rows(self) -> int:
        """Rows of W in a tile."""
        return 16 * self.tiles * self.row_warps

    @property
    def columns(self) -> int:
        """Columns of a stage, a multiple of MATVEC_GRAIN."""
        return 64 * self.blocks * self.column_warps

    def stage(self, tokens: int) -> int:
        """Bytes of a stage: codes, scales and so many rows of x."""
        return self.rows * self.columns // 16 * 9 + (tokens if tokens <= 8 else -(-tokens // 8) * 8) * self.columns * 2

    def sums(self, tokens: int) -> int:
        """Bytes of the sums that warps hand on to each other in a round."""
        return self.row_warps * -(-self.tiles * -(-tokens // 8) // self.rounds) * (self.column_warps - 1) * 512


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
MATVEC_GRAIN = 256
"""`in` is a multiple of it for `matvec`: a row of scales is then a multiple of 16 bytes, as cp.async requires."""
LEAST_OUT = 128
"""Fewest rows of W for `matvec`, a tile's or more."""
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
    if not gradient and rows <= MATVEC_ROWS and summed % MATVEC_GRAIN == 0 and written >= LEAST_OUT:
        return matvec_config(rows, shape, cores)
    if shape[1] % RS_GRAIN == 0 and summed % RS_TERMS == 0 and written >= _rs(gradient).columns:
        return matmul_rs_config(rows, shape, gradient, cores)
    return None


def most_rows(gradient: bool) -> int:
    """Most rows of x for which `product_config`'s kernels are faster than decoding first."""
    return _MOST_ROWS if gradient else _MOST_ROWS_FORWARD


def matvec_config(rows: int, shape: tuple[int, int], cores: int) -> MatvecConfig:
    """Small tiles in equal numbers a multiprocessor up to eight rows; beyond, large ones, whose sums are cut.

    x is read once for each tile: of more rows it is more than W where tiles are small. Of three heights of a large tile
    the one counts that leaves the fewest multiprocessors without work.
    """
    out, columns = shape
    if rows <= 8:
        tiles = min((3, 2, 1), key=lambda tiles: -(-out // (16 * tiles) // cores) * tiles)
        return MatvecConfig(tiles=tiles, row_warps=1, blocks=2, stages=3)
    stages = 4 if rows <= 24 else 3
    sizes = [MatvecConfig(tiles, row_warps=2, blocks=1, stages=stages) for tiles in (4, 3)]
    sizes.append(MatvecConfig(7, row_warps=2, blocks=1, stages=3, rounds=5))

    def cost(sizes: MatvecConfig) -> float:
        """Time of the busiest multiprocessor and of the sum of the addends, in tiles of a stage; x counts as one."""
        units, steps = -(-out // sizes.rows) * sizes.splits, -(-columns // sizes.columns)
        own = -(-units // cores) * (-(-steps // sizes.splits) + 1) * (sizes.tiles + 1)
        return own + (units / cores * sizes.tiles / 2 if sizes.splits > 1 else 0)

    fitting = [each for each in sizes if each.rows <= out]
    return min((dataclasses.replace(each, splits=splits) for each in fitting for splits in range(1, 9)), key=cost)


def items_config(items: int, shape: tuple[int, int], cores: int) -> MatvecConfig:
    """Block sizes of the products of items, each with a matrix of its own: stages that columns fill.

    Args:
        items: as many as there may be.
        shape: (out, in) of a matrix.
        cores: multiprocessors.
    """
    out, columns = shape
    sizes = [MatvecConfig(row_warps=warps, blocks=blocks) for warps, blocks in ((1, 2), (2, 3), (2, 2), (4, 2))]
    best = min(sizes, key=lambda sizes: -(-columns // sizes.columns) * sizes.columns)

    def cost(tiles: int) -> float:
        """Time of the busiest multiprocessor: of a unit's codes, and of its x and the end of its sums."""
        return -(-items * -(-out // (16 * tiles * best.row_warps)) // cores) * (tiles + 0.5)

    return dataclasses.replace(best, tiles=min((2, 1), key=cost))


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
