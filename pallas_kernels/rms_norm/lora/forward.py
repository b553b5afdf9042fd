"""A norm whose rows are wanted in float8 and as rank products alone, in Pallas-Triton; arguments as in `api`.

    n = scale · x · rstd        codes ⊗ scales ≈ n        p = n·Aᵀ = rstd · x·(scale · A)ᵀ

n is not written. A program of the first kernel holds a row; one of the second owns a tile of tokens and a run of
features, over which it adds up its share of the products, which XLA adds in one order, the same bits every time. It
multiplies x as it comes: tiles go from memory to the tensor cores without a detour through registers.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jax.typing import ArrayLike

from pallas_kernels.float8.config import RowConfig
from pallas_kernels.float8.scaled import Rounded
from pallas_kernels.float8.scales import scale_of
from pallas_kernels.tiles import Tiles, divisor, width


# Under jit of their own, so that the layers of an unrolled model lower each kernel once and not once each.
@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def round_rows(
    x: Array, weight: Array, eps: ArrayLike, offset: float, config: RowConfig, interpret: bool = False
) -> tuple[Rounded, Array]:
    """The normalised rows in float8, and the reciprocal root mean square of each."""
    codes, scales, rstd = pl.pallas_call(
        functools.partial(_round_rows, offset=offset, size=config.columns),
        out_shape=(
            jax.ShapeDtypeStruct(x.shape, jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct(x.shape[:1], jnp.float32),
            jax.ShapeDtypeStruct(x.shape[:1], jnp.float32),
        ),
        grid=x.shape[:1],
        compiler_params=pltriton.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
        name="rms_norm_round_rows",
    )(x, weight, jnp.float32(eps).reshape(1))
    return Rounded(codes, scales), rstd


def _round_rows(x_ref, weight_ref, eps_ref, codes_ref, scales_ref, rstd_ref, *, offset: float, size: int):
    row, features = pl.program_id(0), x_ref.shape[1]
    columns = jax.lax.iota(jnp.int32, size)
    inside = None if size == features else columns < features

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
def products(x: Array, rstd: Array, scaled_A: Array, tiles: Tiles, interpret: bool = False) -> Array:
    """The rank products of the normalised rows, in the dtype of x; A comes with the scale of each feature."""
    (rows, features), rank = x.shape, scaled_A.shape[0]
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
