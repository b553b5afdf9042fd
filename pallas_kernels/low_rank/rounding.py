"""Rows to float8_e4m3fn and their rank products, from one reading, in Pallas-Triton; arguments as in `api`.

The rows' largest magnitudes are known before. A program owns a tile of tokens and a run of features, over which it adds
up its share of the products; XLA adds the shares in one order, the same bits every time.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.float8.scaled import Rounded
from pallas_kernels.float8.scales import scale_of
from pallas_kernels.low_rank.triton import sum_of_shares
from pallas_kernels.tiles import Tiles, divisor, width


# Under jit of its own, so that the layers of an unrolled model lower the kernel once and not once each.
@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def round_rows(
    dy: Array, absmax: Array, lora_B: Array, parts: tuple[int, ...], tiles: Tiles, interpret: bool = False
) -> tuple[Array, Rounded]:
    """The gradient of the products in the dtype of dy, and dy's rows in float8."""
    (rows, features), rank = dy.shape, lora_B.shape[1]
    columns = width(math.gcd(*parts), tiles.columns)
    loop = divisor(math.gcd(*parts) // columns, tiles.loop)
    run = columns * loop
    partial, codes, scales = pl.pallas_call(
        functools.partial(_round_rows, columns=columns, rows_of_tile=tiles.rows, loop=loop),
        out_shape=(
            jax.ShapeDtypeStruct((features // run, rows, rank), jnp.float32),
            jax.ShapeDtypeStruct(dy.shape, jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct(absmax.shape, jnp.float32),
        ),
        grid=(features // run, rows // tiles.rows),
        compiler_params=pltriton.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name="low_rank_round_rows",
    )(dy, absmax, lora_B)
    return sum_of_shares(partial, parts, run).astype(dy.dtype), Rounded(codes, scales)


def _round_rows(
    dy_ref, absmax_ref, b_ref, partial_ref, codes_ref, scales_ref, *, columns: int, rows_of_tile: int, loop: int
):
    share, rows = pl.program_id(0), pl.ds(pl.program_id(1) * rows_of_tile, rows_of_tile)
    scales, inverse = scale_of(absmax_ref[rows])

    def body(number, total):
        cols = pl.ds((share * loop + number) * columns, columns)
        dy = dy_ref[rows, cols]
        codes_ref[rows, cols] = (dy.astype(jnp.float32) * inverse[:, None]).astype(codes_ref.dtype)
        return pltriton.dot(dy, b_ref[cols, :]) - (-total)  # a product that is waited for, as `tiles` says

    zero = jnp.zeros((rows_of_tile, b_ref.shape[1]), jnp.float32)
    partial_ref[share, rows, :] = jax.lax.fori_loop(0, loop, body, zero)

    scales_ref[rows] = scales  # the same from every run of features
