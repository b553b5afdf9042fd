"""dw[g] = Σ dy_i x_iᵀ over the rows of group g on Hopper: persistent, warp-specialised.

A tile is 256 columns of x by 256 of dy, summed over the group's rows in pieces of 64. Its two halves in x's columns go
to the two thread blocks of a cluster, and dy's piece is loaded once and multicast to both. The tensor cores get both
operands transposed, and the sums, x's columns down, are transposed as they are written. Rows of the
neighbouring groups in a group's first and last piece are made zeros in shared memory.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.grouped_matmul.config import TERMS, MatmulConfig
from pallas_kernels.grouped_matmul.mosaic_sm90 import rows as rows_at
from pallas_kernels.grouped_matmul.mosaic_sm90.stages import CONSUMERS, UNIT, announce, run_warpgroups, sums_of
from pallas_kernels.grouped_matmul.schedule import ALIGNED
from pallas_kernels.mosaic import launch


class _Tile(NamedTuple):
    """Rows [begin, end) of a group, read from `first` on; first columns of x and of dy; pieces of the sums."""

    group: Any
    begin: Any
    end: Any
    first: Any
    column: Any
    n_column: Any
    pieces: Any


@functools.partial(jax.jit, static_argnames=("dtype", "config", "cores", "interpret"))
def dw(
    dy: Array,
    x: Array,
    group_sizes: Array,
    rows: Array | None = None,
    *,
    dtype: DTypeLike,
    config: MatmulConfig,
    cores: int,
    interpret: Any = None,
) -> Array:
    """The gradient of every group's matrix.

    Args:
        dy: bfloat16 or float16, [M, N]; rows are a multiple of 8, columns of 64.
        x: of dy's dtype, [T, K]; of such multiples.
        group_sizes: int32 [X].
        rows: int32 [M], row of x for each row of dy; None: x's own.
        dtype: of the result, of 16 bits or float32.
        config: block sizes; the interpreter takes no clusters.
        cores: multiprocessors; each runs one thread block.
        interpret: parameters of Mosaic's interpreter, to run on any device; None compiles.
    """
    if interpret is not None and rows is not None:  # its loads are assembly
        x, rows = x[rows], None
    groups, (count, n), k = group_sizes.shape[0], dy.shape, x.shape[1]
    ends = jnp.minimum(jnp.cumsum(group_sizes, dtype=jnp.int32), count)
    bounds = jnp.pad(ends, (1, 0))
    cluster = config.cluster
    out_columns = 128 // jnp.dtype(dtype).itemsize
    scratch = {
        "x_smem": plgpu.SMEM((config.stages, CONSUMERS, TERMS, UNIT), x.dtype, transforms=rows_at.SWIZZLED),
        "dy_smem": plgpu.SMEM((config.stages, TERMS, config.columns), x.dtype, transforms=rows_at.SWIZZLED),
        "out_smem": plgpu.SMEM(
            (CONSUMERS, 2, 64, UNIT),
            dtype,
            transforms=(plgpu.TilingTransform((8, out_columns)), plgpu.SwizzleTransform(128)),
        ),
        "x_full": plgpu.Barrier(num_barriers=config.stages, num_arrivals=CONSUMERS if rows is None else 1),
        "dy_full": plgpu.Barrier(num_barriers=config.stages),
        "free": plgpu.ClusterBarrier(collective_axes=("rank",), num_barriers=config.stages, num_arrivals=CONSUMERS)
        if cluster > 1
        else plgpu.Barrier(num_barriers=config.stages, num_arrivals=CONSUMERS),
    }
    [out] = launch(
        functools.partial(_kernel, config=config, clusters=cores // cluster),
        {"dy": dy, "x": x, "bounds": bounds, "rows": rows},
        {"out": jax.ShapeDtypeStruct((groups, n, k), dtype)},
        scratch,
        name="grouped_matmul_dw",
        grid=("cluster", cores // cluster),
        threads=CONSUMERS + 1,
        cluster=cluster,
        interpret=interpret,
    )
    return out


def _kernel(refs, *, config: MatmulConfig, clusters: int):
    cluster, warpgroup = lax.axis_index("cluster"), lax.axis_index("warpgroup")
    rank = lax.axis_index("rank") if config.cluster > 1 else 0
    groups, n, k = refs.out.shape
    width = CONSUMERS * UNIT * config.cluster
    down, across = pl.cdiv(k, width), pl.cdiv(n, config.columns)
    turns = lax.div(groups * down * across - cluster + clusters - 1, jnp.int32(clusters))

    def tile_of(turn):
        tile = cluster + turn * clusters
        group, own = lax.div(tile, jnp.int32(down * across)), lax.rem(tile, jnp.int32(down * across))
        begin, end = refs.bounds[group], refs.bounds[group + 1]
        first = lax.div(begin, jnp.int32(ALIGNED)) * ALIGNED
        pieces = lax.select(begin < end, lax.div(end - first + TERMS - 1, jnp.int32(TERMS)), jnp.int32(0))
        column, n_column = lax.rem(own, jnp.int32(down)) * width, lax.div(own, jnp.int32(down)) * config.columns
        return _Tile(group, begin, end, first, column, n_column, pieces)

    def compute(turn, count):
        tile = tile_of(turn)
        column = tile.column + (rank * CONSUMERS + warpgroup) * UNIT
        sums = _multiply(refs, warpgroup, count, tile, config)
        _write(refs, warpgroup, sums, tile.group, tile.n_column, column, config)
        return count + tile.pieces

    load = functools.partial(_load, refs, rank, config=config)
    run_warpgroups(refs, warpgroup, turns, compute, lambda turn, count: load(tile_of(turn), count), config)


def _load(refs, rank, tile, count, *, config: MatmulConfig):
    """The loading warpgroup's part of a tile: x and dy of every piece, as far ahead as there are free stages."""
    gathered = refs.rows is not None

    def load(index, carry):
        count, chosen = carry
        slot, row = lax.rem(count, jnp.int32(config.stages)), tile.first + index * TERMS
        if gathered:
            announce(refs.x_full, count, config.stages)
        # Every product with the stage is done, in both thread blocks of a cluster: the copy of dy below writes half of
        # the stage here and half in the neighbour. The first round of stages starts empty.
        pl.when(count >= config.stages)(lambda: plgpu.barrier_wait(refs.free.at[slot]))
        axes = "rank" if config.cluster > 1 else None
        source = refs.dy.at[pl.ds(row, TERMS), pl.ds(tile.n_column, config.columns)]
        plgpu.copy_gmem_to_smem(source, refs.dy_smem.at[slot], refs.dy_full.at[slot], collective_axes=axes)
        for part in range(CONSUMERS):
            own = tile.column + (rank * CONSUMERS + part) * UNIT
            if gathered:
                rows_at.gather(refs.x, chosen, refs.x_smem.at[slot, part], own)
            else:
                source = refs.x.at[pl.ds(row, TERMS), pl.ds(own, UNIT)]
                plgpu.copy_gmem_to_smem(source, refs.x_smem.at[slot, part], refs.x_full.at[slot])
        if gathered:
            rows_at.gather_commit()
            chosen = rows_at.choose(refs.rows, row + TERMS, tile.begin, tile.end)
        return count + 1, chosen

    chosen = rows_at.choose(refs.rows, tile.first, tile.begin, tile.end) if gathered else None
    return lax.fori_loop(0, tile.pieces, load, (count, chosen))[0]


def _multiply(refs, consumer, count, tile: _Tile, config: MatmulConfig):
    """A warpgroup's sums of a tile, [columns of x, columns of dy]."""

    def multiply(sums_ref, index, slot):
        x = refs.x_smem.at[slot, consumer]
        row = tile.first + index * TERMS

        if refs.rows is None:  # gathered rows of other groups are zeros already

            @pl.when(jnp.logical_or(row < tile.begin, row + TERMS > tile.end))
            def _():
                values = x[...]
                number = plgpu.broadcasted_iota(jnp.int32, (TERMS, UNIT), 0, layout=plgpu.Layout.WGMMA)
                own = jnp.logical_and(number >= tile.begin - row, number < tile.end - row)
                x[...] = jnp.where(own, values, jnp.zeros_like(values))
                plgpu.commit_smem()

        plgpu.wgmma(sums_ref, x.T, refs.dy_smem.at[slot])

    return sums_of(refs, refs.dy_full, count, tile.pieces, multiply, config)


def _write(refs, consumer, sums, group, n_column, column, config: MatmulConfig):
    """Write a warpgroup's columns of x, 64 rows of the result at a time."""
    for number, start in enumerate(range(0, config.columns, 64)):
        tile = refs.out_smem.at[consumer, number % 2]
        values = sums[:, start : start + 64].astype(tile.dtype)
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # of two buffers the other one's store may be in flight
        if refs.interpreted:
            tile[...] = values.T
        else:
            tile.T[...] = plgpu.layout_cast(values, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, refs.out.at[group, pl.ds(n_column + start, 64), pl.ds(column, UNIT)])
