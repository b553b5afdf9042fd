"""A norm before LoRA adapters in Pallas-Triton, for NVIDIA GPUs from Ampere on; arguments as in `api`.

Forward, where the normalised rows are wanted in float8 and as rank products alone, they are not written:

    n = scale · x · rstd        codes ⊗ scales ≈ n        p = n·Aᵀ = rstd · x·(scale · A)ᵀ

Backward a program owns a tile of features and a run of tokens, over which it adds up its share of A's gradient. Shares
are added by XLA in one order: no atomics, the same bits every time.

What a row's or a column's factor multiplies is multiplied by a thin product (`pallas_kernels.thin`). A's gradient is a
sum over tokens of dp·rstd ⊗ x, times the scale: in bfloat16 rstd goes into dp before, so that the product reads x where
it has been loaded, and normalised rows are not written back to shared memory. In float16 dp·rstd might be too small.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jax.typing import ArrayLike

from pallas_kernels.dispatch import compute_capability
from pallas_kernels.float8.scaled import Rounded
from pallas_kernels.float8.scales import scale_of
from pallas_kernels.float8.triton import padded, row_warps
from pallas_kernels.thin import PARTS, parts, side_by_side
from pallas_kernels.tiles import Tiles, divisor, width


def backward_config(capability: tuple[int, int], rank: int) -> Tiles:
    """Block sizes by compute capability and rank."""
    if capability < (9, 0):
        return Tiles(rows=16, columns=64, loop=16, num_warps=4, num_stages=2)
    # as measured on an H200 for ranks 32 and 64; twice the warps hold the sums of rank 128
    return Tiles(rows=64, columns=64, loop=32, num_warps=4 if rank <= 64 else 8, num_stages=3)


def products_config(rank: int) -> Tiles:
    """Block sizes of the rank products, features along the loop; as measured on an H100 for rank 32."""
    return Tiles(rows=64, columns=128 if rank <= 64 else 64, loop=16, num_warps=4, num_stages=3)


# Under jit of their own, so that the layers of an unrolled model lower each kernel once and not once each.
@functools.partial(jax.jit, static_argnums=(3, 4))
def round_rows(
    x: Array, weight: Array, eps: ArrayLike, offset: float, interpret: bool = False
) -> tuple[Rounded, Array]:
    """The normalised rows in float8, and the reciprocal root mean square of each; a program holds a row."""
    codes, scales, rstd = pl.pallas_call(
        functools.partial(_round_rows, offset=offset),
        out_shape=(
            jax.ShapeDtypeStruct(x.shape, jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct(x.shape[:1], jnp.float32),
            jax.ShapeDtypeStruct(x.shape[:1], jnp.float32),
        ),
        grid=x.shape[:1],
        compiler_params=pltriton.CompilerParams(num_warps=row_warps(x.shape[1]), num_stages=1),
        interpret=interpret,
        name="rms_norm_round_rows",
    )(x, weight, jnp.float32(eps).reshape(1))
    return Rounded(codes, scales), rstd


def _round_rows(x_ref, weight_ref, eps_ref, codes_ref, scales_ref, rstd_ref, *, offset: float):
    row, features = pl.program_id(0), x_ref.shape[1]
    columns = jax.lax.iota(jnp.int32, padded(features))
    inside = None if columns.size == features else columns < features

    def load(ref):
        other = None if inside is None else jnp.zeros((), ref.dtype)
        return pltriton.load(ref, mask=inside, other=other).astype(jnp.float32)

    x, scale = load(x_ref.at[row, columns]), load(weight_ref.at[columns]) + offset
    rstd = jax.lax.rsqrt(jnp.sum(x * x) / features + eps_ref[0])
    normed = (x * rstd * scale).astype(x_ref.dtype).astype(jnp.float32)
    scales, inverse = scale_of(jnp.max(jnp.abs(normed)))
    pltriton.store(codes_ref.at[row, columns], (normed * inverse).astype(codes_ref.dtype), mask=inside)
    scales_ref[row], rstd_ref[row] = scales, rstd


@functools.partial(jax.jit, static_argnums=(3, 4))
def products(x: Array, rstd: Array, scaled_A: Array, tiles: Tiles | None = None, interpret: bool = False) -> Array:
    """The rank products of the normalised rows, in the dtype of x; A comes with the scale of each feature.

    A program owns a tile of tokens and a run of features, over which it adds up its share of the products. It
    multiplies x as it comes: tiles go from memory to the tensor cores without a detour through registers.
    """
    (rows, features), rank = x.shape, scaled_A.shape[0]
    tiles = tiles or products_config(rank)
    columns = width(features, tiles.columns)
    loop = divisor(features // columns, tiles.loop)
    shares = features // columns // loop
    partial = pl.pallas_call(
        functools.partial(_products, columns=columns, rows_of_tile=tiles.rows, loop=loop),
        out_shape=jax.ShapeDtypeStruct((shares, rows, rank), jnp.float32),
        grid=(shares, rows // tiles.rows),
        compiler_params=pltriton.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name="rms_norm_products",
    )(x, scaled_A)
    return (jnp.sum(partial, axis=0) * rstd[:, None]).astype(x.dtype)


def _products(x_ref, a_ref, partial_ref, *, columns: int, rows_of_tile: int, loop: int):
    share, rows = pl.program_id(0), pl.ds(pl.program_id(1) * rows_of_tile, rows_of_tile)

    def body(number, total):
        cols = pl.ds((share * loop + number) * columns, columns)
        return total + pltriton.dot(x_ref[rows, cols], a_ref[:, cols], trans_b=True)

    zero = jnp.zeros((rows_of_tile, a_ref.shape[0]), jnp.float32)
    partial_ref[share, rows, :] = jax.lax.fori_loop(0, loop, body, zero)


@functools.partial(jax.jit, static_argnums=(8, 9))
def backward(
    x: Array,
    scale: Array,
    rstd: Array,
    mean: Array,
    lora_A: Array,
    dresidual: Array,
    dnormed: Array,
    dproducts: Array,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """The gradients of x and A; `mean` is that of g·n over a row."""
    (rows, features), tiles = x.shape, tiles or backward_config(compute_capability(), lora_A.shape[0])
    tiles = dataclasses.replace(tiles, columns=width(features, tiles.columns))
    loop = divisor(rows // tiles.rows, tiles.loop)
    shares = rows // tiles.rows // loop
    of_rows = side_by_side([part for part in parts(rstd) for _ in range(PARTS)] + parts(rstd * rstd * mean))
    one = jnp.ones(features, jnp.bfloat16)
    of_columns = side_by_side(parts(scale) * PARTS), side_by_side([-one] * PARTS, PARTS * PARTS)
    early = x.dtype == jnp.bfloat16
    through_rstd = (dproducts.astype(jnp.float32) * rstd[:, None]).astype(x.dtype) if early else None
    dx, dA = pl.pallas_call(
        functools.partial(_backward, tiles=tiles, loop=loop),
        out_shape=(
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((shares, features, lora_A.shape[0]), jnp.float32),
        ),
        grid=(features // tiles.columns, shares),
        compiler_params=pltriton.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name="rms_norm_lora_backward",
    )(x, of_rows, of_columns, lora_A, dresidual, dnormed, dproducts, through_rstd)
    dA = jnp.sum(dA, axis=0).T
    return dx, dA * scale[None] if early else dA


def _backward(
    x_ref,
    of_rows_ref,
    of_columns_refs,
    a_ref,
    dresidual_ref,
    dnormed_ref,
    dproducts_ref,
    through_rstd_ref,
    dx_ref,
    dA_ref,
    *,
    tiles: Tiles,
    loop: int,
):
    share = pl.program_id(1)
    cols = pl.ds(pl.program_id(0) * tiles.columns, tiles.columns)
    lora_A, (to_unit, minus_mean) = a_ref[:, cols], (ref[cols, :] for ref in of_columns_refs)
    dtype = dx_ref.dtype

    def rows_of(number):
        return pl.ds((share * loop + number) * tiles.rows, tiles.rows)

    def load(number):
        return dnormed_ref[rows_of(number), cols], dresidual_ref[rows_of(number), cols]

    def body(number, carry):
        dA, (dnormed, dresidual) = carry
        rows = rows_of(number)
        # Triton has several tiles in flight only of what a matrix product depends on; the others are read ahead here.
        following = load(jnp.minimum(number + 1, loop - 1))
        x, of_rows, dproducts = x_ref[rows, cols], of_rows_ref[rows, :], dproducts_ref[rows, :]
        if through_rstd_ref is not None:  # before the products that are waited for, as `tiles` says
            dA = dA + pltriton.dot(x, through_rstd_ref[rows, :], trans_a=True)
        unit = pltriton.dot(of_rows, to_unit, trans_b=True)  # rstd · scale
        through = (dnormed.astype(jnp.float32) + pltriton.dot(dproducts, lora_A)) * unit
        mean = x.astype(jnp.float32) * pltriton.dot(of_rows, minus_mean, trans_b=True)
        dx_ref[rows, cols] = (dresidual.astype(jnp.float32) + through + mean).astype(dtype)
        if through_rstd_ref is None:
            normed = (x.astype(jnp.float32) * unit).astype(dtype)
            dA = dA + pltriton.dot(normed, dproducts, trans_a=True)
        return dA, following

    zero = jnp.zeros((tiles.columns, lora_A.shape[0]), jnp.float32)
    dA_ref[share, cols, :] = jax.lax.fori_loop(0, loop, body, (zero, load(0)))[0]
