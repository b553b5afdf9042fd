"""The product over groups with matrices in NF4, decoded as it multiplies, in Pallas-Triton: for few rows a group.

A program owns a tile of the result, of one group. Of each block of 64 columns in the split order, a byte holds a code
of the first and one of the second 32: decoded they are two tiles, each of every other 32 columns of the matrix, and two
products: in the forward pass with those columns of x, in the gradient with those of the result.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.grouped_matmul.config import NF4Config
from pallas_kernels.grouped_matmul.schedule import schedule
from pallas_kernels.grouped_matmul.triton_tiles import Ref, load_tile, numbers, store_tile
from pallas_kernels.nf4 import ptx
from pallas_kernels.nf4.codebook import BLOCK, BLOCK_BYTES
from pallas_kernels.nf4.triton import look_up


# Under jit of its own, so that the layers of an unrolled model lower the kernel once and not once each.
@functools.partial(jax.jit, static_argnames=("gradient", "through", "config", "interpret"))
def matmul(
    x: Array,
    codes: Array,
    absmax: Array,
    group_sizes: Array,
    rows: Array | None,
    *,
    gradient: bool,
    through: str | None,
    config: NF4Config,
    interpret: bool = False,
) -> Array:
    """y_i = w[g(i)] x_i, or x_i w[g(i)] for the gradient.

    Args:
        x: [T, in], or [T, out] for the gradient; bfloat16 or float16.
        codes: uint8 [X, out, in/2] in the split order.
        absmax: float32 [X, out, in/64].
        group_sizes: int32 [X].
        rows: int32 [M], row of x for each row of the result; None: x's own.
        gradient: of the product in x.
        through: dtype that values are rounded to before x's; None for none.
        config: block sizes.
        interpret: run on any device, in jax.numpy.
    """
    groups, out, blocks = absmax.shape
    count, columns = (x if rows is None else rows).shape[0], blocks * BLOCK if gradient else out
    width = config.blocks * BLOCK if gradient else config.out
    table = schedule(group_sizes, count, config.rows, pl.cdiv(columns, width), 1)
    return pl.pallas_call(
        functools.partial(_kernel, gradient=gradient, through=through, config=config, interpret=interpret),
        out_shape=jax.ShapeDtypeStruct((count, columns), x.dtype),
        grid=(table.tiles.shape[0],),
        compiler_params=pltriton.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name="grouped_nf4_matmul_dx" if gradient else "grouped_nf4_matmul",
    )(*table, x, codes.reshape(groups, out, blocks, BLOCK_BYTES), absmax, rows)


def _kernel(
    tiles_ref,
    count_ref,
    x_ref,
    codes_ref,
    absmax_ref,
    rows_ref,
    out_ref,
    *,
    gradient: bool,
    through: str | None,
    config: NF4Config,
    interpret: bool,
):
    tile, span = pl.program_id(0), config.blocks * BLOCK
    groups, out, blocks = absmax_ref.shape

    @pl.when(tile < count_ref[0])
    def _():
        group, begin, end, first, column = (tiles_ref[tile, field] for field in range(5))
        rows = numbers(first, config.rows)
        own = (rows >= begin) & (rows < end)
        sources = rows if rows_ref is None else pltriton.load(rows_ref.at[rows], mask=own, other=0)
        # Rows past the last group are of a group that has no matrix: their sums have no terms.
        filled = (group < groups).astype(jnp.int32)

        def decode(out_tile: Array, block_tile: Array) -> tuple[Array, ...]:
            places = group, out_tile * config.out, block_tile * config.blocks
            codes, absmax = _load_blocks(codes_ref, absmax_ref, *places, config)
            shape = config.out, config.blocks * BLOCK_BYTES

            def halves() -> tuple[Array, ...]:
                decoded = (look_up(codes, absmax, x_ref.dtype, half, through, interpret) for half in ptx.HALVES)
                return tuple(half.reshape(shape) for half in decoded)

            # It does begin inside. But out of a branch Triton moves no operation to the registers of the product, where
            # the four codes of a word are of several blocks in the gradient, and the look-up takes them for one's.
            begins_inside = (places[1] < out) & (places[2] < blocks)
            return lax.cond(begins_inside, halves, lambda: (jnp.zeros(shape, x_ref.dtype),) * 2)

        def forward(piece: Array, total: Array) -> Array:
            for half, w in enumerate(decode(column, piece)):
                x = load_tile(x_ref, (), sources, _half(piece, half, config), own=own, span=span)
                total = total + pltriton.dot(x, w, trans_b=True)
            return total

        def backward(piece: Array, totals: tuple[Array, ...]) -> tuple[Array, ...]:
            dy = load_tile(x_ref, (), sources, numbers(piece * config.out, config.out), own=own)
            return tuple(total + pltriton.dot(dy, w) for total, w in zip(totals, decode(piece, column), strict=True))

        if gradient:
            totals = (jnp.zeros((config.rows, config.blocks * BLOCK_BYTES), jnp.float32),) * 2
            totals = lax.fori_loop(jnp.int32(0), filled * pl.cdiv(out, config.out), backward, totals)
            for half, total in enumerate(totals):
                store_tile(out_ref, (), rows, _half(column, half, config), total, own=own, span=span)
        else:
            total = jnp.zeros((config.rows, config.out), jnp.float32)
            total = lax.fori_loop(jnp.int32(0), filled * pl.cdiv(blocks, config.blocks), forward, total)
            store_tile(out_ref, (), rows, numbers(column * config.out, config.out), total, own=own)


def _half(block_tile: Array, half: int, config: NF4Config) -> Array:
    """The columns of a tile of blocks whose codes are the low (0) or the high (1) four bits of a byte."""
    place = lax.iota(jnp.int32, config.blocks * BLOCK_BYTES)
    block, byte = lax.div(place, jnp.int32(BLOCK_BYTES)), lax.rem(place, jnp.int32(BLOCK_BYTES))
    return (block_tile * config.blocks + block) * BLOCK + half * BLOCK_BYTES + byte


def _load_blocks(
    codes_ref: Ref, absmax_ref: Ref, group: Array, first_row: Array, first_block: Array, config: NF4Config
) -> tuple[Array, Array]:
    """A tile's blocks of one row after the other: codes [out · blocks, 32] and absmax [out · blocks, 1]."""
    place = lax.iota(jnp.int32, config.out * config.blocks)
    row = first_row + lax.div(place, jnp.int32(config.blocks))
    block = first_block + lax.rem(place, jnp.int32(config.blocks))
    _, height, width = absmax_ref.shape
    inside = (row < height) & (block < width) if height % config.out or width % config.blocks else None
    codes = pltriton.load(
        codes_ref.at[group, row[:, None], block[:, None], lax.iota(jnp.int32, BLOCK_BYTES)[None, :]],
        mask=None if inside is None else inside[:, None],
        other=None if inside is None else jnp.uint8(0),
    )
    absmax = pltriton.load(
        absmax_ref.at[group, row, block], mask=inside, other=None if inside is None else jnp.float32(0)
    )
    return codes, absmax[:, None]
