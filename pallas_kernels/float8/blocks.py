"""float8_e4m3fn with a scale for each block of a row, for what a forward pass keeps for its backward pass.

A scale is a power of two, so its exponent says it all, in a byte, and decoding is exact in float32 and in bfloat16: a
kept number is rounded once, to three bits of mantissa (activations of such formats: COAT, Xi et al., arXiv 2410.19313).
Exponents lie block by block, each for all rows: a kernel's tile writes them in one piece.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.float8.scales import scale_of

_MANTISSA = 23


class Blocks(NamedTuple):
    """Rows in float8_e4m3fn.

    Attributes:
        codes: float8_e4m3fn, a number over its block's scale, rounded to nearest even.
        exponents: the scales' exponents as float32 has them, biased; 255 is infinity. Blocks first, rows behind.
    """

    codes: Float[Array, "*rows in"]
    exponents: UInt8[Array, "in/block *rows"]


def quantize_blocks(x: Float[Array, "*rows in"], block: int) -> Blocks:
    """Round each block of a row to float8_e4m3fn by a scale of its own, as `scales.scale_of` chooses it.

    Args:
        x: bfloat16, float16 or float32. A block with infinity gets an infinite scale, NaN stays NaN.
        block: elements that share a scale; it divides the row.

    Raises:
        ValueError: it does not.
    """
    if x.shape[-1] % block:
        raise ValueError(f"float8.quantize_blocks: block must divide rows of {x.shape[-1]}, got {block}")
    blocks = x.reshape(*x.shape[:-1], -1, block)
    scale, inverse = scale_of(jnp.max(jnp.abs(blocks), axis=-1).astype(jnp.float32))
    codes = (blocks.astype(jnp.float32) * inverse[..., None]).astype(jnp.float8_e4m3fn)
    return Blocks(codes.reshape(x.shape), jnp.moveaxis(exponent_of(scale), -1, 0))


def dequantize_blocks(blocks: Blocks) -> Float[Array, "*rows in"]:
    """The numbers in float32.

    Args:
        blocks: of `quantize_blocks`.
    """
    codes, scales = blocks.codes, jnp.moveaxis(scale_from(blocks.exponents), 0, -1)
    apart = codes.reshape(*scales.shape, -1).astype(jnp.float32) * scales[..., None]
    return apart.reshape(codes.shape)


def exponent_of(scale: Float[Array, "..."]) -> UInt8[Array, "..."]:
    """The biased exponent of a power of two.

    Args:
        scale: float32, normal or infinite.
    """
    return (jax.lax.bitcast_convert_type(scale, jnp.int32) >> _MANTISSA).astype(jnp.uint8)


def scale_from(exponent: UInt8[Array, "..."] | Int[Array, "..."]) -> Float[Array, "..."]:
    """The power of two that `exponent_of` has read, float32.

    Args:
        exponent: biased.
    """
    return jax.lax.bitcast_convert_type(exponent.astype(jnp.int32) << _MANTISSA, jnp.float32)
