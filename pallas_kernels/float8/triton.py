"""Rows to float8_e4m3fn with Pallas-Triton: a program holds a whole row in registers and reads it once."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float, UInt8

from pallas_kernels.float8.scaled import Rounded
from pallas_kernels.float8.scales import scale_from, scale_of

#: Most columns of a row that a program holds in registers.
MOST_COLUMNS = 32768
#: Most columns of codes whose blocks are brought to one scale.
MOST_JOINED = 2 * MOST_COLUMNS


def padded(columns: int) -> int:
    """Columns of a program that holds a row: a power of two."""
    return max(16, pl.next_power_of_2(columns))


def row_warps(columns: int, per_warp: int = 1024) -> int:
    """Warps of a program that holds a row: 32 elements a thread.

    So there are as many programs as a multiprocessor has threads for.
    """
    return max(1, padded(columns) // per_warp)


def too_wide(columns: int, most: int) -> str | None:
    """Why a program cannot hold a row, as a clause; None where it can."""
    return f"it holds rows of up to {most} columns, these have {columns}" if columns > most else None


class Blocks(NamedTuple):
    """Rows in float8_e4m3fn with a scale for each block of a row, as kernels write them that see a tile of it.

    Attributes:
        codes: a number over its block's scale, rounded to nearest even.
        exponents: of the scales, as `scales.exponent_of` gives them; 255 is infinity. Blocks first, rows behind: a tile
            writes them in one piece.
    """

    codes: Float[Array, "N in"]
    exponents: UInt8[Array, "in/block N"]


# Under jit of its own, so that the layers of an unrolled model lower the kernel once and not once each.
@functools.partial(jax.jit, static_argnames=("interpret",))
def quantize_rows(
    x: Float[Array, "N in"], *, interpret: bool = False
) -> tuple[Float[Array, "N in"], Float[Array, " N"]]:
    """Codes and scales.

    Args:
        x: bfloat16, float16 or float32.
        interpret: run on any device, in jax.numpy.
    """
    rows, columns = x.shape
    return pl.pallas_call(
        _kernel,
        out_shape=(jax.ShapeDtypeStruct(x.shape, jnp.float8_e4m3fn), jax.ShapeDtypeStruct((rows,), jnp.float32)),
        grid=(rows,),
        compiler_params=pltriton.CompilerParams(num_warps=row_warps(columns), num_stages=1),
        interpret=interpret,
        name="float8_quantize_rows",
    )(x)


def _kernel(x_ref, codes_ref, scales_ref):
    row, columns = pl.program_id(0), jax.lax.iota(jnp.int32, padded(x_ref.shape[1]))
    inside = columns < x_ref.shape[1] if columns.size != x_ref.shape[1] else None
    zero = None if inside is None else jnp.zeros((), x_ref.dtype)
    # Held as it comes: 16 bits take half the registers.
    x = pltriton.load(x_ref.at[row, columns], mask=inside, other=zero)
    scale, inverse = scale_of(jnp.max(jnp.abs(x)).astype(jnp.float32))
    codes = (x.astype(jnp.float32) * inverse).astype(codes_ref.dtype)
    pltriton.store(codes_ref.at[row, columns], codes, mask=inside)
    scales_ref[row] = scale


@functools.partial(jax.jit, static_argnames=("interpret",))
def join_blocks(blocks: Blocks, *, interpret: bool = False) -> Rounded:
    """Rows in float8 out of rows whose blocks have scales of their own.

    A code is rounded once more where the row's scale makes it less than the format's least normal number, 2⁻¹⁵ of the
    row's largest.

    Args:
        blocks: of rows of two axes.
        interpret: run on any device, in jax.numpy.
    """
    rows, columns = blocks.codes.shape
    codes, scales = pl.pallas_call(
        _join,
        out_shape=(
            jax.ShapeDtypeStruct(blocks.codes.shape, blocks.codes.dtype),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
        ),
        grid=(rows,),
        # 64 elements a thread, codes and factors: as measured on an H100 for 14,336 columns
        compiler_params=pltriton.CompilerParams(num_warps=row_warps(columns, 2048), num_stages=1),
        input_output_aliases={0: 0},
        interpret=interpret,
        name="float8_join_blocks",
    )(*blocks)
    return Rounded(codes, scales)


def _join(blocks_ref, exponents_ref, codes_ref, scales_ref):
    width, count = blocks_ref.shape[1], exponents_ref.shape[0]
    row, columns = pl.program_id(0), jax.lax.iota(jnp.int32, padded(width))
    inside = columns < width if columns.size != width else None
    zero = (None, None) if inside is None else (jnp.zeros((), blocks_ref.dtype), jnp.uint8(0))
    codes = pltriton.load(blocks_ref.at[row, columns], mask=inside, other=zero[0])
    exponents = pltriton.load(exponents_ref.at[columns // (width // count), row], mask=inside, other=zero[1])
    exponents = exponents.astype(jnp.int32)
    largest = jnp.max(exponents)
    factors = scale_from(jnp.maximum(exponents - largest + 127, 0))
    joined = (codes.astype(jnp.float32) * factors).astype(codes_ref.dtype)
    pltriton.store(codes_ref.at[row, columns], joined, mask=inside)
    scales_ref[row] = scale_from(largest)
