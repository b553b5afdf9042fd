"""The backward pass of a norm before LoRA adapters in Pallas-Triton, for NVIDIA GPUs from Ampere on; see `api`.

A program owns a tile of features and a run of tokens, over which it adds up its share of A's gradient. The shares are
added by XLA in one order: no atomics, the same bits every time.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.tiles import Tiles, divisor, width


# Under jit of their own, so that the layers of an unrolled model lower each kernel once and not once each.
@functools.partial(jax.jit, static_argnums=(8, 9, 10))
def backward(
    x: Array,
    scale: Array,
    rstd: Array,
    mean: Array,
    lora_A: Array,
    dresidual: Array,
    dnormed: Array,
    dproducts: Array,
    round_first: bool,
    tiles: Tiles,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """The gradients of x and A; `mean` is that of g·n over a row."""
    rows, features = x.shape
    tiles = dataclasses.replace(tiles, columns=width(features, tiles.columns))
    loop = divisor(rows // tiles.rows, tiles.loop)
    shares = rows // tiles.rows // loop
    dx, dA = pl.pallas_call(
        functools.partial(_backward, round_first=round_first, tiles=tiles, loop=loop),
        out_shape=(
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((shares, features, lora_A.shape[0]), jnp.float32),
        ),
        grid=(features // tiles.columns, shares),
        compiler_params=pltriton.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name="rms_norm_lora_backward",
    )(x, scale, rstd, mean, lora_A, dresidual, dnormed, dproducts)
    return dx, jnp.sum(dA, axis=0).T


def _backward(
    x_ref,
    scale_ref,
    rstd_ref,
    mean_ref,
    a_ref,
    dresidual_ref,
    dnormed_ref,
    dproducts_ref,
    dx_ref,
    dA_ref,
    *,
    round_first: bool,
    tiles: Tiles,
    loop: int,
):
    share = pl.program_id(1)
    cols = pl.ds(pl.program_id(0) * tiles.columns, tiles.columns)
    scale, lora_A = scale_ref[cols][None, :], a_ref[:, cols]
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
        rstd, dproducts = rstd_ref[rows][:, None], dproducts_ref[rows, :]
        unit = x_ref[rows, cols].astype(jnp.float32) * rstd
        g = (dnormed.astype(jnp.float32) + pltriton.dot(dproducts, lora_A)) * scale
        dx = dresidual.astype(jnp.float32) + rstd * (g - unit * mean_ref[rows][:, None])
        dx_ref[rows, cols] = dx.astype(dtype)
        rounded = unit.astype(dtype).astype(jnp.float32) if round_first else unit
        dA = dA + pltriton.dot((rounded * scale).astype(dtype), dproducts, trans_a=True)
        return dA, following

    zero = jnp.zeros((tiles.columns, lora_A.shape[0]), jnp.float32)
    dA_ref[share, cols, :] = jax.lax.fori_loop(0, loop, body, (zero, load(0)))[0]
