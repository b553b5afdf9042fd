"""The products over groups in Pallas-Triton: NVIDIA GPUs from Ampere on (compute capability 8.0 and more).

A program owns one tile of the result, of one group, and adds it up in float32 in one order: no atomics, the same bits
every time. Loads and stores take masks, so rows and columns of any number are served as they lie, and rows may be
gathered in the load.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jax.typing import DTypeLike

from pallas_kernels.grouped_matmul.config import TritonConfig, tile_size, triton_config, triton_dw_config
from pallas_kernels.grouped_matmul.schedule import schedule
from pallas_kernels.grouped_matmul.triton_tiles import Ref, load_tile, numbers, store_tile


# Under jit of their own, so that the layers of an unrolled model lower each kernel once and not once each.
@functools.partial(jax.jit, static_argnames=("transposed", "config", "interpret"))
def matmul(
    x: Array,
    w: Array,
    group_sizes: Array,
    rows: Array | None,
    low_rank: tuple[Array, Array] | None,
    *,
    transposed: bool = False,
    config: TritonConfig | None = None,
    interpret: bool = False,
) -> Array:
    """y_i = w[g(i)] x_i + b[g(i)] z_i; `interpret` runs on any device, in jax.numpy."""
    count, columns = (x if rows is None else rows).shape[0], w.shape[2 if transposed else 1]
    config = config or triton_config(count / w.shape[0], columns)
    # Columns are numbered by tiles: their product with a constant is known to be aligned, a number in memory is not.
    table = schedule(group_sizes, count, config.rows, pl.cdiv(columns, config.columns), 1)
    return pl.pallas_call(
        functools.partial(_matmul_kernel, transposed=transposed, config=config),
        out_shape=jax.ShapeDtypeStruct((count, columns), x.dtype),
        grid=(table.tiles.shape[0],),
        compiler_params=pltriton.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="grouped_matmul_dx" if transposed else "grouped_matmul",
    )(*table, x, w, rows, low_rank)


#: dx_i = dy_i w[g(i)] + z_i a[g(i)].
dx = functools.partial(matmul, transposed=True)


def _matmul_kernel(
    tiles_ref, count_ref, x_ref, w_ref, rows_ref, low_rank_refs, out_ref, *, transposed: bool, config: TritonConfig
):
    tile = pl.program_id(0)

    @pl.when(tile < count_ref[0])
    def _():
        group, begin, end, first, column = (tiles_ref[tile, field] for field in range(5))
        rows, columns = numbers(first, config.rows), numbers(column * config.columns, config.columns)
        own = (rows >= begin) & (rows < end)
        sources = rows if rows_ref is None else pltriton.load(rows_ref.at[rows], mask=own, other=0)

        def add(total: Array, x_ref: Ref, sources: Array, w_ref: Ref) -> Array:
            summed = x_ref.shape[1]
            width = tile_size(summed, config.terms)

            def body(piece: Array, total: Array) -> Array:
                terms = numbers(piece * width, width)
                x = load_tile(x_ref, (), sources, terms, own=own)
                places = (terms, columns) if transposed else (columns, terms)
                w = load_tile(w_ref, (group,), *places)
                return total + pltriton.dot(x, w, trans_b=not transposed)

            # Rows past the last group are of a group that has no matrix: their sums have no terms.
            pieces = (group < w_ref.shape[0]).astype(jnp.int32) * pl.cdiv(summed, width)
            return lax.fori_loop(jnp.int32(0), pieces, body, total)

        total = add(jnp.zeros((config.rows, config.columns), jnp.float32), x_ref, sources, w_ref)
        if low_rank_refs is not None:
            total = add(total, low_rank_refs[0], rows, low_rank_refs[1])
        store_tile(out_ref, (), rows, columns, total, own=own)


def dw(
    dy: Array,
    x: Array,
    group_sizes: Array,
    rows: Array | None,
    dtype: DTypeLike,
    *,
    config: TritonConfig | None = None,
    interpret: bool = False,
) -> Array:
    """dw[g] = Σ dy_i x_iᵀ over the rows of the group; `interpret` as in `matmul`."""
    config = config or triton_dw_config((dy.shape[1], x.shape[1]))
    return _dw(dy, x, group_sizes, rows, dtype=jnp.dtype(dtype), config=config, interpret=interpret)


@functools.partial(jax.jit, static_argnames=("dtype", "config", "interpret"))
def _dw(dy, x, group_sizes, rows, *, dtype: DTypeLike, config: TritonConfig, interpret: bool):
    shape = (group_sizes.shape[0], dy.shape[1], x.shape[1])
    bounds = jnp.pad(jnp.minimum(jnp.cumsum(group_sizes, dtype=jnp.int32), dy.shape[0]), (1, 0))
    tiles = pl.cdiv(shape[1], config.rows) * pl.cdiv(shape[2], config.columns)
    return pl.pallas_call(
        functools.partial(_dw_kernel, config=config),
        out_shape=jax.ShapeDtypeStruct(shape, dtype),
        grid=(tiles, shape[0]),
        compiler_params=pltriton.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="grouped_matmul_dw",
    )(bounds, dy, x, rows)


def _dw_kernel(bounds_ref, dy_ref, x_ref, rows_ref, out_ref, *, config: TritonConfig):
    across = pl.cdiv(x_ref.shape[1], config.columns)
    tile, group = pl.program_id(0), pl.program_id(1)
    begin, end = bounds_ref[group], bounds_ref[group + 1]
    of_dy = numbers(lax.div(tile, jnp.int32(across)) * config.rows, config.rows)
    of_x = numbers(lax.rem(tile, jnp.int32(across)) * config.columns, config.columns)

    def body(piece: Array, total: Array) -> Array:
        rows = numbers(begin + piece * config.terms, config.terms)
        own = rows < end
        sources = rows if rows_ref is None else pltriton.load(rows_ref.at[rows], mask=own, other=0)
        dy = load_tile(dy_ref, (), rows, of_dy, own=own)
        x = load_tile(x_ref, (), sources, of_x, own=own)
        return total + pltriton.dot(dy, x, trans_a=True)

    pieces = lax.div(end - begin + (config.terms - 1), jnp.int32(config.terms))
    total = lax.fori_loop(jnp.int32(0), pieces, body, jnp.zeros((config.rows, config.columns), jnp.float32))
    store_tile(out_ref, (group,), of_dy, of_x, total)
