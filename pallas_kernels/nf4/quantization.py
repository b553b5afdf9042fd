"""Weights to NF4, bit for bit as bitsandbytes does it on a CPU; everything runs under jit, on any device.

XLA contracts a product and a sum that it fuses to one instruction with one rounding. Where bitsandbytes rounds twice,
`rounding.kept` keeps the two apart.
"""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from pallas_kernels.nf4.codebook import (
    BLOCK,
    BLOCK_BYTES,
    DYNAMIC_MAP,
    NESTED_BLOCK,
    NF4_VALUES,
    ORDERS,
)
from pallas_kernels.rounding import kept, quotient
from pallas_kernels.transformations import with_automatic_axes

_BRANCHES = 16
# What bitsandbytes records for a last, partial block of zeros. It is subnormal; XLA's CPU code flushes those to zero in
# float arithmetic, a choice between two floats included, so the choice is made between bits.
_SMALLEST_PARTIAL_ABSMAX = np.float32(1e-38).view(np.int32)


# Under jit of their own, so that a program with many matrices traces and lowers each once for a shape.
@jax.jit
def quantize(weight: Float[Array, "out in"]) -> tuple[UInt8[Array, " bytes"], Float[Array, " blocks"]]:
    """Quantise a matrix to NF4 in blocks of 64 (Dettmers et al., arXiv 2305.14314).

    absmax = max |w| of the block; code = how many midpoints between neighbouring values lie below w · (1 / absmax), all
    in float32. A tie goes to the lower code; a block of zeros decodes to zeros.

    Args:
        weight: the matrix, float32, float16 or bfloat16; finite. Numbers below the smallest normal float32 (1.2e-38)
            may count as zero.

    Returns:
        codes: uint8 [ceil(out·in / 2)], flat, in bitsandbytes' order.
        absmax: float32 [ceil(out·in / 64)].

    Raises:
        ValueError: not a matrix of one of these dtypes.
    """
    if weight.ndim != 2 or weight.dtype not in (jnp.float32, jnp.float16, jnp.bfloat16):
        raise ValueError(
            f"nf4.quantize: weight must be [out, in] in float32, float16 or bfloat16, got {weight.dtype}{weight.shape}"
        )
    flat = weight.reshape(-1).astype(jnp.float32)
    whole = flat.size // BLOCK * BLOCK
    blocks = flat[:whole].reshape(-1, BLOCK)
    absmax = jnp.max(jnp.abs(blocks), axis=1)
    codes = _count_midpoints_below(blocks * _reciprocal(absmax)[:, None]).reshape(-1)
    if whole < flat.size:  # the last block is partial: bitsandbytes divides there
        last = flat[whole:]
        largest = jnp.max(jnp.abs(last), keepdims=True)
        codes = jnp.concatenate([codes, _count_midpoints_below(quotient(last, jnp.where(largest > 0, largest, 1.0)))])
        absmax = jnp.concatenate([absmax, _or_smallest(largest)])
    if codes.size % 2:
        codes = jnp.append(codes, jnp.uint8(np.flatnonzero(NF4_VALUES == 0)[0]))
    return (codes[::2] << jnp.uint8(4)) | codes[1::2], absmax


def reorder(codes: UInt8[Array, "..."], source: str, to: str) -> UInt8[Array, "..."]:
    """Repack codes from one order to another, without loss in both directions.

    Args:
        codes: uint8; whole blocks of 32 bytes, in any shape.
        source: the order that they are in, "bitsandbytes" or "split".
        to: the order that they are wanted in.

    Returns:
        The codes in the same shape.

    Raises:
        ValueError: an unknown order, or codes that are not whole blocks.
    """
    for name, order in (("source", source), ("to", to)):
        if order not in ORDERS:
            raise ValueError(f"nf4.reorder: {name} must be one of {ORDERS}, got {order!r}")
    if codes.dtype != jnp.uint8 or codes.size % BLOCK_BYTES:
        raise ValueError(
            f"nf4.reorder: codes must be uint8 in whole blocks of {BLOCK_BYTES} bytes, got {codes.dtype}{codes.shape} "
            "(pad bitsandbytes' codes with zeros to whole blocks)"
        )
    return codes if source == to else _repacked(codes, source)


@functools.partial(jax.jit, static_argnums=1, inline=True)
def _repacked(codes: UInt8[Array, "..."], source: str) -> UInt8[Array, "..."]:
    """Codes of one order in the other."""
    blocks = codes.reshape(-1, BLOCK_BYTES)
    low, high = blocks & jnp.uint8(15), blocks >> jnp.uint8(4)
    if source == "bitsandbytes":
        elements = jnp.stack([high, low], axis=2).reshape(-1, 2, BLOCK_BYTES)
        repacked = elements[:, 0] | (elements[:, 1] << jnp.uint8(4))
    else:
        elements = jnp.concatenate([low, high], axis=1).reshape(-1, BLOCK_BYTES, 2)
        repacked = (elements[:, :, 0] << jnp.uint8(4)) | elements[:, :, 1]
    return repacked.reshape(codes.shape)


@jax.jit
def quantize_absmax(
    absmax: Float[Array, " blocks"], offset: Float[Array, ""] | float | None = None
) -> tuple[UInt8[Array, " blocks"], Float[Array, " nested"], Float[Array, ""]]:
    """Quantise the scales too ("double quantisation"): 8-bit codes of DYNAMIC_MAP in blocks of 256.

    As bitsandbytes' CPU code does, a scaled value is rounded to an even grid of 65,536 points over [-1, 1] and gets
    the code nearest to its grid point; its CUDA code skips the grid, and one code in a thousand differs by one step.

    Args:
        absmax: float32, flat.
        offset: subtracted first; None for their `mean`. (The order of a mean's additions is not part of the
            format: codes equal bitsandbytes' for an equal offset.)

    Returns:
        codes: uint8, one a scale.
        nested_absmax: float32 [ceil(blocks / 256)].
        offset: float32 scalar.
    """
    offset = mean(absmax) if offset is None else jnp.asarray(offset, jnp.float32)
    return with_automatic_axes(_quantize_absmax, absmax, offset, rows_like=(absmax, None, None))


def _quantize_absmax(absmax: Array, offset: Array) -> tuple[Array, Array, Array]:
    centred = absmax - offset[None]
    padded = jnp.pad(centred, (0, -absmax.size % NESTED_BLOCK)).reshape(-1, NESTED_BLOCK)
    nested_absmax = jnp.max(jnp.abs(padded), axis=1)
    scaled = kept(padded * _reciprocal(nested_absmax)[:, None], offset != offset)
    scaled = jnp.clip(scaled, -1.0, 1.0)
    grid = kept((scaled + 1.0) * 0.5 * 65535.0, offset != offset) + 0.5
    codes = jnp.asarray(_nearest_on_grid())[grid.astype(jnp.int32)]
    codes = jnp.where(nested_absmax[:, None] == 0, jnp.uint8(0), codes)
    return codes.reshape(-1)[: absmax.size], nested_absmax, offset


def mean(scales: Float[Array, " blocks"]) -> Float[Array, ""]:
    """The mean of scales, in a fixed order: equal bits on every device, and to `convert.formats.nf4.mean`.

    The sum has two float32 numbers, the second for the rounding of the first (Knuth's two-sum), and is taken in a tree
    of 16 branches; it is rounded to float32 once and then divided.

    Args:
        scales: float32, none below 0; finite.

    Raises:
        ValueError: there are none, or `jax.export` leaves their number open.
    """
    if jax.export.is_symbolic_dim(scales.size) or not scales.size:
        raise ValueError(f"nf4.mean: expected scales of a known number, at least one, got {scales.shape}")
    return with_automatic_axes(_mean, scales, rows_like=None)


def _mean(scales: Array) -> Array:
    # A power of two, so that no sum of fewer than 2²⁸ scales overflows.
    large = jnp.max(scales) > 2.0**99
    unit, back = (jnp.where(large, jnp.float32(power), jnp.float32(1)) for power in (2.0**-28, 2.0**28))
    high, low = scales * unit[None], jnp.zeros_like(scales)
    while high.size > 1:
        columns = -(-high.size // _BRANCHES)
        padding = (0, columns * _BRANCHES - high.size)
        parts = [jnp.pad(part, padding).reshape(_BRANCHES, columns) for part in (high, low)]
        high, low = parts[0][0], parts[1][0]
        for branch in range(1, _BRANCHES):
            more, rest = parts[0][branch], parts[1][branch]
            total = high + more
            added = total - high
            low = low + (rest + ((high - (total - added)) + (more - added)))
            high = total
    return quotient((high + low)[0], scales.size) * back


@functools.partial(jax.jit, inline=True)
def dequantize_absmax(
    quantized: UInt8[Array, "..."],
    nested_absmax: Float[Array, "..."],
    nested_quant_map: Float[Array, " 256"],
    offset: Float[Array, ""],
) -> Float[Array, "..."]:
    """Nested scales back to float32: map[code] · nested_absmax + offset, rounded after the product and after the sum.

    Args:
        quantized: uint8 codes, one a block of the weight, in any shape.
        nested_absmax: float32, one for each 256 codes.
        nested_quant_map: float32 [256].
        offset: float32 scalar.

    Returns:
        absmax in the shape of `quantized`.

    Raises:
        ValueError: numbers of codes and of nested scales that do not fit together.
    """
    if nested_absmax.size != -(-quantized.size // NESTED_BLOCK):
        raise ValueError(
            f"nf4.dequantize_absmax: {quantized.size} codes need {-(-quantized.size // NESTED_BLOCK)} nested scales "
            f"(one for each {NESTED_BLOCK}), got nested_absmax {nested_absmax.shape}"
        )
    flat = quantized.reshape(-1)
    padded = jnp.pad(flat, (0, -flat.size % NESTED_BLOCK)).reshape(-1, NESTED_BLOCK)
    values = nested_quant_map.at[padded.astype(jnp.int32)].get(mode="promise_in_bounds")
    scaled = kept(values * nested_absmax.reshape(-1, 1), offset != offset)
    return (scaled + offset.reshape(1, 1)).reshape(-1)[: flat.size].reshape(quantized.shape)


def _count_midpoints_below(scaled: Float[Array, "..."]) -> UInt8[Array, "..."]:
    middles = (NF4_VALUES[:-1] + NF4_VALUES[1:]) / np.float32(2)
    return sum((scaled > middle).astype(jnp.uint8) for middle in middles)  # pyright: ignore[reportReturnType]


def _reciprocal(absmax: Float[Array, "..."]) -> Float[Array, "..."]:
    """1 / absmax, and 0 for a block of zeros."""
    return jnp.where(absmax > 0, quotient(jnp.ones_like(absmax), jnp.where(absmax > 0, absmax, 1.0)), 0.0)


def _or_smallest(absmax: Float[Array, "1"]) -> Float[Array, "1"]:
    bits = jnp.where(absmax > 0, jax.lax.bitcast_convert_type(absmax, jnp.int32), _SMALLEST_PARTIAL_ABSMAX)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


@functools.cache
def _nearest_on_grid() -> np.ndarray:
    """uint8 [65536]: the code nearest to each point of an even grid over [-1, 1]."""
    points = (np.arange(65536) / 65535 * 2 - 1).astype(np.float32)
    middles = (DYNAMIC_MAP[:-1] + DYNAMIC_MAP[1:]) / np.float32(2)
    return np.searchsorted(middles, points, side="left").astype(np.uint8)
