"""The sums with low-rank products in Pallas-Triton, for NVIDIA GPUs from Ampere on; arguments as in `api`.

In the backward kernels a program owns a tile of features and a run of tokens, over which it adds up its share of the
gradient of B or A. The shares, and those of the products' gradient that a tile of features gives, are added by XLA in
one order: no atomics, the same bits every time.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.dispatch import compute_capability
from pallas_kernels.float8.scaled import Rounded, Scaled, product_of, values_at
from pallas_kernels.float8.scales import scale_of
from pallas_kernels.low_rank import config
from pallas_kernels.tiles import Tiles, divisor, width


# Under jit of their own, so that the layers of an unrolled model lower each kernel once and not once each.
@functools.partial(jax.jit, static_argnums=(4, 5, 6))
def add(
    residual: Array | None,
    base: Array | Scaled,
    products: Array,
    lora_B: Array,
    parts: tuple[int, ...],
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> Array:
    """The sum residual + base + products·Bᵀ."""
    (rows, features), tiles = product_of(base).shape, tiles or config.add_config(lora_B.shape[1])
    columns = width(math.gcd(*parts), tiles.columns)
    loop = divisor(rows // tiles.rows, tiles.loop)
    return pl.pallas_call(
        functools.partial(_add, parts=parts, columns=columns, rows_of_tile=tiles.rows, loop=loop),
        out_shape=jax.ShapeDtypeStruct((rows, features), products.dtype),
        grid=(features // columns, rows // tiles.rows // loop),
        compiler_params=pltriton.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name="low_rank_add",
    )(residual, base, products, lora_B)


def _add(residual_ref, base_ref, products_ref, b_ref, sum_ref, *, parts, columns: int, rows_of_tile: int, loop: int):
    share, own = pl.program_id(1), _columns_of_part(parts, columns, b_ref.shape[1])
    cols = pl.ds(pl.program_id(0) * columns, columns)
    lora_B = b_ref[cols, :]

    def body(number, carry):
        rows = pl.ds((share * loop + number) * rows_of_tile, rows_of_tile)
        total = values_at(base_ref, rows, cols) + pltriton.dot(products_ref[rows, own], lora_B, trans_b=True)
        if residual_ref is not None:
            total = total + residual_ref[rows, cols].astype(jnp.float32)
        sum_ref[rows, cols] = total.astype(sum_ref.dtype)
        return carry

    jax.lax.fori_loop(0, loop, body, 0)


@functools.partial(jax.jit, static_argnums=(3, 5, 6))
def output_gradients(
    dy: Array,
    products: Array,
    lora_B: Array,
    parts: tuple[int, ...],
    absmax: Array | None,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> tuple[Array, Array, Rounded | None]:
    """The gradient of the products in the dtype of dy, that of B in float32, and dy in float8 where absmax is given."""
    tiles = tiles or config.output_config(compute_capability())
    (rows, features), rank = dy.shape, lora_B.shape[1]
    columns = width(math.gcd(*parts), tiles.columns)
    loop = divisor(rows // tiles.rows, tiles.loop)
    shares = rows // tiles.rows // loop
    rounded: Any = None
    if absmax is not None:
        rounded = Rounded(jax.ShapeDtypeStruct(dy.shape, jnp.float8_e4m3fn), jax.ShapeDtypeStruct((rows,), jnp.float32))  # pyright: ignore
    partial, dB, rounded = pl.pallas_call(
        functools.partial(_output_gradients, parts=parts, columns=columns, rows_of_tile=tiles.rows, loop=loop),
        out_shape=(
            jax.ShapeDtypeStruct((features // columns, rows, rank), jnp.float32),
            jax.ShapeDtypeStruct((shares, features, rank), jnp.float32),
            rounded,
        ),
        grid=(features // columns, shares),
        compiler_params=pltriton.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name="low_rank_output_gradients",
    )(dy, products, lora_B, absmax)
    return sum_of_shares(partial, parts, columns).astype(dy.dtype), jnp.sum(dB, axis=0), rounded


def sum_of_shares(partial: Array, parts: tuple[int, ...], columns: int) -> Array:
    """The products of each part side by side, float32 [N, PR], from those of each run of `columns`, [runs, N, R]."""
    ends = itertools.accumulate((part // columns for part in parts), initial=0)
    sums = [jnp.sum(partial[start:end], axis=0) for start, end in itertools.pairwise(ends)]
    return sums[0] if len(sums) == 1 else jnp.concatenate(sums, axis=1)


def _output_gradients(
    dy_ref,
    products_ref,
    b_ref,
    absmax_ref,
    dproducts_ref,
    dB_ref,
    rounded,
    *,
    parts: tuple[int, ...],
    columns: int,
    rows_of_tile: int,
    loop: int,
):
    column, share, rank = pl.program_id(0), pl.program_id(1), b_ref.shape[1]
    cols = pl.ds(column * columns, columns)
    lora_B = b_ref[cols, :]
    own = _columns_of_part(parts, columns, rank)

    def body(number, dB):
        rows = pl.ds((share * loop + number) * rows_of_tile, rows_of_tile)
        dy = dy_ref[rows, cols]
        dB = dB + pltriton.dot(dy, products_ref[rows, own], trans_a=True)  # before one that is waited for: see `tiles`
        dproducts_ref[column, rows, :] = pltriton.dot(dy, lora_B)
        if rounded is not None:
            scales, inverse = scale_of(absmax_ref[rows])
            rounded.codes[rows, cols] = (dy.astype(jnp.float32) * inverse[:, None]).astype(rounded.codes.dtype)
            rounded.scales[rows] = scales  # the same from every tile of features
        return dB

    dB_ref[share, cols, :] = jax.lax.fori_loop(0, loop, body, jnp.zeros((columns, rank), jnp.float32))


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def round_rows(
    dy: Array,
    absmax: Array,
    lora_B: Array,
    parts: tuple[int, ...],
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> tuple[Array, Rounded]:
    """The gradient of the products in the dtype of dy, and dy's rows in float8, whose largest magnitudes are known.

    A program owns a tile of tokens and a run of features, over which it adds up its share of the products.
    """
    tiles = tiles or config.round_config(lora_B.shape[1])
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


@functools.partial(jax.jit, static_argnums=(4, 5))
def input_gradients(
    dx: Array, x: Array, dproducts: Array, lora_A: Array, tiles: Tiles | None = None, interpret: bool = False
) -> tuple[Array, Array]:
    """The sum dx + dproducts·A in the dtype of dx, and dproductsᵀ·x in float32."""
    rows, features = dx.shape
    tiles = tiles or config.input_config(compute_capability(), lora_A.shape[0])
    tiles = dataclasses.replace(tiles, columns=width(features, tiles.columns))
    loop = divisor(rows // tiles.rows, tiles.loop)
    shares = rows // tiles.rows // loop
    dx, dA = pl.pallas_call(
        functools.partial(_input_gradients, tiles=tiles, loop=loop),
        out_shape=(
            jax.ShapeDtypeStruct(dx.shape, dx.dtype),
            jax.ShapeDtypeStruct((shares, features, lora_A.shape[0]), jnp.float32),
        ),
        grid=(features // tiles.columns, shares),
        compiler_params=pltriton.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name="low_rank_input_gradients",
    )(dx, x, dproducts, dproducts, lora_A)
    return dx, jnp.sum(dA, axis=0).T


def _input_gradients(dx_ref, x_ref, dproducts_ref, same_ref, a_ref, sum_ref, dA_ref, *, tiles: Tiles, loop: int):
    share = pl.program_id(1)
    cols = pl.ds(pl.program_id(0) * tiles.columns, tiles.columns)
    lora_A = a_ref[:, cols]

    def body(number, dA):
        rows = pl.ds((share * loop + number) * tiles.rows, tiles.rows)
        through = pltriton.dot(same_ref[rows, :], lora_A)  # read of its own, as `tiles` says
        sum_ref[rows, cols] = (dx_ref[rows, cols].astype(jnp.float32) + through).astype(sum_ref.dtype)
        return dA + pltriton.dot(x_ref[rows, cols], dproducts_ref[rows, :], trans_a=True)

    zero = jnp.zeros((tiles.columns, lora_A.shape[0]), jnp.float32)
    dA_ref[share, cols, :] = jax.lax.fori_loop(0, loop, body, zero)


def _columns_of_part(parts: tuple[int, ...], columns: int, rank: int):
    """The columns of the products that belong to the program's part."""
    start = pl.program_id(0) * columns
    ends = itertools.accumulate(parts[:-1])
    return pl.ds(sum(((start >= end).astype(jnp.int32) for end in ends), jnp.int32(0)) * rank, rank)
