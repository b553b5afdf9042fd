"""Scales of a decode to float8_e4m3fn, made before it from absmax alone, in one pass with Pallas-Triton.

By rows a program holds whole rows of absmax: it finds their scales and writes absmax over them. By columns the maxima
are of parts of the rows, one a program, which whoever needs them reduces once more: XLA's own reduction down the
columns keeps a tenth of an H200 busy. Absmax is transposed on the way.

Maxima are taken of bits, which order as the numbers do, none below 0, with NaN above all: what a device makes of NaN
in a maximum of numbers does not matter then.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int32

from pallas_kernels.float8.scales import scale_of

_MAGNITUDE = 0x7FFFFFFF
#: Of absmax, whole cache lines.
_COLUMNS = 32


def bits_of(absmax: Float[Array, "..."]) -> Int32[Array, "..."]:
    """Bits whose order is the numbers', without the sign that a NaN may have."""
    return lax.bitcast_convert_type(absmax, jnp.int32) & jnp.int32(_MAGNITUDE)


def scales_of(bits: Int32[Array, "..."]) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """`float8.scale_of` of the number with these bits."""
    return scale_of(lax.bitcast_convert_type(bits, jnp.float32))


# Under jit of their own, so that the layers of an unrolled model lower each kernel once and not once each.
@functools.partial(jax.jit, static_argnames=("interpret",))
def scale_rows(
    absmax: Float[Array, "out blocks"], *, interpret: bool = False
) -> tuple[Float[Array, "out blocks"], Float[Array, " out"]]:
    """Absmax over the scales of its rows, and these.

    Args:
        absmax: float32, none below 0.
        interpret: run on any device, in jax.numpy.
    """
    out, blocks = absmax.shape
    count = max(1, 2048 // pl.next_power_of_2(blocks))  # sixteen numbers a thread
    return pl.pallas_call(
        functools.partial(_scale_rows, count=count),
        out_shape=(jax.ShapeDtypeStruct(absmax.shape, jnp.float32), jax.ShapeDtypeStruct((out,), jnp.float32)),
        grid=(pl.cdiv(out, count),),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="nf4_dequantize_scale_rows",
    )(absmax)


def _scale_rows(absmax_ref, scaled_ref, scales_ref, *, count: int):
    out, blocks = absmax_ref.shape
    rows = pl.program_id(0) * count + lax.iota(jnp.int32, count)
    columns = lax.iota(jnp.int32, pl.next_power_of_2(blocks))
    inside = (rows < out)[:, None] & (columns < blocks)[None, :]
    own = (rows[:, None], columns[None, :])
    absmax = pltriton.load(absmax_ref.at[own], mask=inside, other=jnp.float32(0))
    scales, inverse = scales_of(jnp.max(bits_of(absmax), axis=1))
    pltriton.store(scaled_ref.at[own], absmax * inverse[:, None], mask=inside)
    pltriton.store(scales_ref.at[rows], scales, mask=rows < out)


@functools.partial(jax.jit, static_argnames=("interpret",))
def transpose_and_largest(
    absmax: Float[Array, "out blocks"], *, interpret: bool = False
) -> tuple[Float[Array, "blocks out"], Int32[Array, "blocks parts"]]:
    """Absmax transposed, and bits of the largest of parts of each of its rows.

    Args:
        absmax: float32, none below 0.
        interpret: run on any device, in jax.numpy.
    """
    out, blocks = absmax.shape
    parts = 128 * pl.cdiv(out, 32768)  # of 256 rows at most, 64 numbers a thread; 128 keep a card busy
    return pl.pallas_call(
        _transpose_and_largest,
        out_shape=(
            jax.ShapeDtypeStruct((blocks, out), jnp.float32),
            jax.ShapeDtypeStruct((blocks, parts), jnp.int32),
        ),
        grid=(parts, pl.cdiv(blocks, _COLUMNS)),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="nf4_dequantize_largest",
    )(absmax)


def _transpose_and_largest(absmax_ref, transposed_ref, largest_ref):
    (out, blocks), part = absmax_ref.shape, pl.program_id(0)
    size = pl.cdiv(out, largest_ref.shape[1])
    within = lax.iota(jnp.int32, pl.next_power_of_2(size))
    rows = part * size + within
    columns = pl.program_id(1) * _COLUMNS + lax.iota(jnp.int32, _COLUMNS)
    inside = ((within < size) & (rows < out))[:, None] & (columns < blocks)[None, :]
    absmax = pltriton.load(absmax_ref.at[rows[:, None], columns[None, :]], mask=inside, other=jnp.float32(0))
    pltriton.store(transposed_ref.at[columns[:, None], rows[None, :]], absmax.T, mask=inside.T)
    pltriton.store(largest_ref.at[columns, part], jnp.max(bits_of(absmax), axis=0), mask=columns < blocks)
