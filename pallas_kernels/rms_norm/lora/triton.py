"""The backward pass of a norm before LoRA adapters in Pallas-Triton, for NVIDIA GPUs from Ampere on; see `api`.

A program owns a tile of features and a run of tokens, over which it adds up its share of A's gradient. The shares are
added by XLA in one order: no atomics, the same bits every time.

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

from pallas_kernels.thin import PARTS, parts, side_by_side
from pallas_kernels.tiles import Tiles, divisor, width


# Under jit of their own, so that the layers of an unrolled model lower each kernel once and not once each.
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
    tiles: Tiles,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """The gradients of x and A; `mean` is that of g·n over a row."""
    rows, features = x.shape
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
