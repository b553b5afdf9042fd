"""A norm in a residual stream in Pallas-Triton, for NVIDIA GPUs from Ampere on; arguments as in `api`.

A program holds whole rows, one after the other, with the next one on its way: each array is read once. The backward
kernel adds up the weight's gradient over its rows; XLA adds the programs' sums in one order, the same bits every time.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jax.typing import ArrayLike

from pallas_kernels.rms_norm.config import rows_of_program, warps


# Under jit of their own, so that the layers of an unrolled model lower each kernel once and not once each.
@functools.partial(jax.jit, static_argnums=(3, 4))
def forward(x: Array, weight: Array, eps: ArrayLike, offset: float, interpret: bool = False) -> tuple[Array, Array]:
    """The normalised rows, and the reciprocal root mean square of each."""
    rows, features = x.shape
    normed, rstd = pl.pallas_call(
        functools.partial(_forward, offset=offset),
        out_shape=(jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((rows,), jnp.float32)),
        grid=(rows,),
        compiler_params=pltriton.CompilerParams(num_warps=warps(features), num_stages=1),
        interpret=interpret,
        name="rms_norm_forward",
    )(x, weight, jnp.float32(eps).reshape(1))
    return normed, rstd[:, None]


@functools.partial(jax.jit, static_argnums=(5, 6, 7))
def backward(
    x: Array,
    weight: Array,
    rstd: Array,
    dresidual: Array,
    dnormed: Array,
    offset: float,
    run: int | None = None,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """The gradients of x and of the weight; `run` rows a program."""
    (rows, features), run = x.shape, run or rows_of_program(*x.shape)
    count = pl.cdiv(rows, run)
    dx, dweight = pl.pallas_call(
        functools.partial(_backward, offset=offset, run=run),
        out_shape=(jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((count, features), jnp.float32)),
        grid=(count,),
        compiler_params=pltriton.CompilerParams(num_warps=warps(features), num_stages=1),
        interpret=interpret,
        name="rms_norm_backward",
    )(x, weight, rstd.reshape(rows), dresidual, dnormed)
    return dx, jnp.sum(dweight, axis=0)


def _columns(features: int) -> tuple[Array, Array | None]:
    """The features of a program's vectors, and which of them there are; None: all."""
    columns = jax.lax.iota(jnp.int32, pl.next_power_of_2(features))
    return columns, None if columns.size == features else columns < features


def _forward(x_ref, weight_ref, eps_ref, normed_ref, rstd_ref, *, offset: float):
    row, features = pl.program_id(0), x_ref.shape[1]
    columns, inside = _columns(features)
    x = _load(x_ref.at[row, columns], inside)
    scale = _load(weight_ref.at[columns], inside) + offset
    rstd = jax.lax.rsqrt(jnp.sum(x * x) / features + eps_ref[0])
    normed = _rounded(x * rstd, normed_ref.dtype, offset) * scale
    pltriton.store(normed_ref.at[row, columns], normed.astype(normed_ref.dtype), mask=inside)
    rstd_ref[row] = rstd


def _backward(x_ref, weight_ref, rstd_ref, dresidual_ref, dnormed_ref, dx_ref, dweight_ref, *, offset: float, run: int):
    program, (rows, features) = pl.program_id(0), x_ref.shape
    columns, inside = _columns(features)
    first, end = program * run, jnp.minimum((program + 1) * run, rows)

    def load(row):
        held = jnp.minimum(row, end - 1)
        return tuple(_raw(ref.at[held, columns], inside) for ref in (x_ref, dnormed_ref))

    def body(row, carry):
        dweight, ready = carry
        following, dresidual = load(row + 1), _raw(dresidual_ref.at[row, columns], inside)
        x, dnormed = (array.astype(jnp.float32) for array in ready)
        scale = _load(weight_ref.at[columns], inside) + offset  # from the cache: the registers are for rows
        rstd = rstd_ref[row]
        unit, g = x * rstd, dnormed * scale
        dx = dresidual.astype(jnp.float32) + rstd * (g - unit * (jnp.sum(g * unit) / features))
        pltriton.store(dx_ref.at[row, columns], dx.astype(dx_ref.dtype), mask=inside)
        return dweight + dnormed * unit, following

    zeros = jnp.zeros(columns.shape, jnp.float32)
    dweight, _ = jax.lax.fori_loop(first, end, body, (zeros, load(first)))
    pltriton.store(dweight_ref.at[program, columns], dweight, mask=inside)


def _raw(ref, inside: Array | None) -> Array:
    other = None if inside is None else jnp.zeros((), ref.dtype)
    return pltriton.load(ref, mask=inside, other=other)


def _load(ref, inside: Array | None) -> Array:
    return _raw(ref, inside).astype(jnp.float32)


def _rounded(normed: Array, dtype, offset: float) -> Array:
    return normed.astype(dtype).astype(jnp.float32) if offset == 0.0 else normed
