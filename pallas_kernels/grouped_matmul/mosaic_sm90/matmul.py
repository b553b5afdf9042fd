"""y_i = w[g(i)] x_i and dx_i = dy_i w[g(i)] on Hopper: persistent, warp-specialised, a cluster a tile of rows.

Two thread blocks form a cluster and take 256 rows of one group: the pieces of its matrix are loaded once and multicast
to both, which brings the traffic of the L2 cache under what it can give (128×256 tiles alone need 48 KB for 4.2 MFLOP;
a cluster 32 KB). A thread block has three warpgroups: one loads, two multiply 64 rows each. The four quarters of a tile
go to the thread blocks in turn, so that a tile with few rows left keeps both busy; a warpgroup without rows multiplies
nothing, and the tensor cores are the other's.

Rows of x come by TMA where they are contiguous, and by `rows.gather` where an index chooses them.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.config import TERMS, MatmulConfig
from pallas_kernels.grouped_matmul.mosaic_sm90 import rows as rows_at
from pallas_kernels.grouped_matmul.mosaic_sm90.stages import CONSUMERS, UNIT, announce, run_warpgroups, sums_of
from pallas_kernels.grouped_matmul.schedule import schedule
from pallas_kernels.mosaic import launch


class _Tile(NamedTuple):
    """A row of the schedule, and the pieces of its sums."""

    group: Any
    begin: Any
    end: Any
    row: Any
    column: Any
    pieces: Any


# Under jit of its own, so that the layers of an unrolled model lower the kernel once and not once each.
@functools.partial(jax.jit, static_argnames=("transposed", "config", "cores", "interpret"))
def matmul(
    x: Array,
    w: Array,
    group_sizes: Array,
    rows: Array | None = None,
    low_rank: tuple[Array, Array] | None = None,
    *,
    transposed: bool,
    config: MatmulConfig,
    cores: int,
    interpret: Any = None,
) -> Array:
    """The product of rows with their group's matrix.

    Args:
        x: bfloat16 or float16, [T, K]; for the gradient dy [M, N]. Rows are a multiple of 8, columns of 64.
        w: [X, N, K].
        group_sizes: int32 [X].
        rows: int32 [M], row of x for each row of the result; None: x's own.
        low_rank: z [M, R] and b [X, N, R] ([X, R, K] for the gradient), more terms of the sum; None: none.
        transposed: whether to sum over N instead of K, as the gradient in x does.
        config: block sizes; the interpreter takes no clusters.
        cores: multiprocessors; each runs one thread block.
        interpret: parameters of Mosaic's interpreter, to run on any device; None compiles.
    """
    if interpret is not None and rows is not None:  # its loads are assembly
        x, rows = x[rows], None
    count = x.shape[0] if rows is None else rows.shape[0]
    z, b = (None, None) if low_rank is None else low_rank
    columns = w.shape[2] if transposed else w.shape[1]
    cluster = config.cluster
    tile_rows = CONSUMERS * UNIT * cluster
    column_tiles = pl.cdiv(columns, config.columns)
    table, tiles = schedule(group_sizes, count, tile_rows, column_tiles, config.columns)
    inputs = {"x": x, "w": w, "z": z, "b": b, "table": table, "tiles": tiles, "rows": rows}
    free = functools.partial(plgpu.ClusterBarrier, collective_axes=("rank",)) if cluster > 1 else plgpu.Barrier
    w_tile = (TERMS, config.columns) if transposed else (config.columns, TERMS)
    scratch = {
        "x_smem": plgpu.SMEM((config.stages, CONSUMERS, UNIT, TERMS), x.dtype, transforms=rows_at.SWIZZLED),
        "w_smem": plgpu.SMEM((config.stages, *w_tile), x.dtype, transforms=rows_at.SWIZZLED),
        "out_smem": plgpu.SMEM((CONSUMERS, 2, UNIT, 64), x.dtype, transforms=rows_at.SWIZZLED),
        "x_full": plgpu.Barrier(num_barriers=config.stages, num_arrivals=CONSUMERS if rows is None else 1),
        "w_full": plgpu.Barrier(num_barriers=config.stages),
        "free": free(num_barriers=config.stages, num_arrivals=CONSUMERS),
    }
    [out] = launch(
        functools.partial(_kernel, transposed=transposed, config=config, clusters=cores // cluster),
        inputs,
        {"out": jax.ShapeDtypeStruct((count, columns), x.dtype)},
        scratch,
        name="grouped_matmul_dx" if transposed else "grouped_matmul",
        grid=("cluster", cores // cluster),
        threads=CONSUMERS + 1,
        cluster=cluster,
        interpret=interpret,
    )
    return out


def _kernel(refs, *, transposed: bool, config: MatmulConfig, clusters: int):
    cluster, warpgroup = lax.axis_index("cluster"), lax.axis_index("warpgroup")
    rank = lax.axis_index("rank") if config.cluster > 1 else 0
    groups, all_pieces = refs.w.shape[0], _main_pieces(refs) + _more_pieces(refs)
    turns = lax.div(refs.tiles[0] - cluster + clusters - 1, jnp.int32(clusters))

    def tile_of(turn):
        tile = cluster + turn * clusters
        group = refs.table[tile, 0]
        # Rows past the last group are summed over nothing: they are zeros.
        pieces = lax.select(group < groups, jnp.int32(all_pieces), jnp.int32(0))
        begin, end, row, column = (refs.table[tile, field] for field in range(1, 5))
        return _Tile(group, begin, end, row, column, pieces)

    def compute(turn, count):
        tile = tile_of(turn)
        pieces, row = tile.pieces, tile.row + (warpgroup * config.cluster + rank) * UNIT

        @pl.when(row < tile.end)
        def _():
            sums = _multiply(refs, warpgroup, count, pieces, transposed, config)
            _write(refs, warpgroup, sums, row, tile, config)

        @pl.when(row >= tile.end)
        def _():
            def skip(index, _):
                slot = lax.rem(count + index, jnp.int32(config.stages))
                plgpu.barrier_wait(refs.x_full.at[slot])
                plgpu.barrier_wait(refs.w_full.at[slot])
                plgpu.barrier_arrive(refs.free.at[slot])

            lax.fori_loop(0, pieces, skip, None)

        return count + pieces

    load = functools.partial(_load, refs, rank, transposed=transposed, config=config)
    run_warpgroups(refs, warpgroup, turns, compute, lambda turn, count: load(tile_of(turn), count), config)


def _main_pieces(refs) -> int:
    """Pieces of x and w."""
    return refs.x.shape[1] // TERMS


def _more_pieces(refs) -> int:
    """Pieces of z and b."""
    return refs.z.shape[1] // TERMS if refs.z is not None else 0


def _load(refs, rank, tile, count, *, transposed: bool, config: MatmulConfig):
    """The loading warpgroup's part of a tile: x and w of every piece, as far ahead as there are free stages."""
    gathered = refs.rows is not None
    first = [tile.row + (part * config.cluster + rank) * UNIT for part in range(CONSUMERS)]
    chosen = [rows_at.choose(refs.rows, row, tile.begin, tile.end) for row in first] if gathered else None

    def load(index, count):
        slot = lax.rem(count, jnp.int32(config.stages))
        if gathered:
            announce(refs.x_full, count, config.stages)
        # Every product with the stage is done, in both thread blocks of a cluster: the copy of w below writes half of
        # the stage here and half in the neighbour. The first round of stages starts empty.
        pl.when(count >= config.stages)(lambda: plgpu.barrier_wait(refs.free.at[slot]))
        columns = pl.ds(tile.column, config.columns)

        def copy(x, w, term, chosen):
            terms = pl.ds(term, TERMS)
            source = w.at[tile.group, terms, columns] if transposed else w.at[tile.group, columns, terms]
            axes = "rank" if config.cluster > 1 else None
            plgpu.copy_gmem_to_smem(source, refs.w_smem.at[slot], refs.w_full.at[slot], collective_axes=axes)
            for part in range(CONSUMERS):
                if chosen is not None:
                    rows_at.gather(x, chosen[part], refs.x_smem.at[slot, part], term)
                else:
                    source = x.at[pl.ds(first[part], UNIT), terms]
                    plgpu.copy_gmem_to_smem(source, refs.x_smem.at[slot, part], refs.x_full.at[slot])

        def copy_more(term):
            # All pieces of a sum come in one way, so that one barrier counts them.
            own = [rows_at.choose(None, row, tile.begin, tile.end) for row in first] if gathered else None
            copy(refs.z, refs.b, term, own)

        if refs.z is not None:
            more = index - _main_pieces(refs)
            pl.when(more < 0)(lambda: copy(refs.x, refs.w, index * TERMS, chosen))
            pl.when(more >= 0)(lambda: copy_more(more * TERMS))
        else:
            copy(refs.x, refs.w, index * TERMS, chosen)
        if gathered:
            rows_at.gather_commit()
        return count + 1

    return lax.fori_loop(0, tile.pieces, load, count)


def _multiply(refs, consumer, count, pieces, transposed: bool, config: MatmulConfig):
    """A warpgroup's sums of a tile."""

    def multiply(sums_ref, _, slot):
        w = refs.w_smem.at[slot]
        plgpu.wgmma(sums_ref, refs.x_smem.at[slot, consumer], w if transposed else w.T)

    return sums_of(refs, refs.w_full, count, pieces, multiply, config)


def _write(refs, consumer, sums, row, tile: _Tile, config: MatmulConfig):
    """Write a warpgroup's rows that belong to the group; of two buffers the other one's store may be in flight."""
    whole = jnp.logical_and(row >= tile.begin, row + UNIT <= tile.end)
    for number, start in enumerate(range(0, config.columns, 64)):
        buffer = refs.out_smem.at[consumer, number % 2]
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        buffer[...] = sums[:, start : start + 64].astype(buffer.dtype)
        plgpu.commit_smem()

        column = tile.column + start
        inside = column < refs.out.shape[1]

        @pl.when(jnp.logical_and(inside, whole))
        def _(buffer=buffer, column=column):
            target = refs.out.at[pl.ds(row, UNIT), pl.ds(column, 64)]
            plgpu.copy_smem_to_gmem(buffer, target, commit_group=False)

        @pl.when(jnp.logical_and(inside, jnp.logical_not(whole)))
        def _(buffer=buffer, column=column):
            if refs.interpreted:

                def one(index, _):
                    refs.out[index, pl.ds(column, 64)] = buffer[index - row]

                lax.fori_loop(lax.max(row, tile.begin), lax.min(row + UNIT, tile.end), one, None)
            else:
                rows_at.store(buffer, refs.out, row, tile.begin, tile.end, column)
                plgpu.commit_smem()  # all have read the buffer before it is written again

        # One set of copies for each buffer in turn, be it empty: how many are under way says which buffer is free.
        plgpu.commit_smem_to_gmem_group()
