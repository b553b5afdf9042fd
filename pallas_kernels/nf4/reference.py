"""NF4 by the definition: for every element its byte, its nibble, its value, its scale. Any order, size and map."""

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from pallas_kernels.nf4.codebook import BLOCK, BLOCK_BYTES, NF4_VALUES
from pallas_kernels.rounding import round_through


def unpack(codes: UInt8[Array, "..."], size: int, order: str) -> UInt8[Array, " size"]:
    """The code of each element, one a byte.

    Args:
        codes: packed codes, flat or in any shape.
        size: number of elements.
        order: "bitsandbytes" or "split".

    Returns:
        Codes 0–15 in the order of the elements.
    """
    element = np.arange(size)
    if order == "bitsandbytes":
        byte, shift = element // 2, np.where(element % 2 == 0, 4, 0)
    else:
        block, place = np.divmod(element, BLOCK)
        byte, shift = block * BLOCK_BYTES + place % BLOCK_BYTES, np.where(place < BLOCK_BYTES, 0, 4)
    return (codes.reshape(-1)[byte] >> jnp.asarray(shift, jnp.uint8)) & jnp.uint8(15)


def dequantize(
    codes: UInt8[Array, "..."],
    absmax: Float[Array, "..."],
    *,
    shape: tuple[int, int],
    dtype: DTypeLike,
    order: str,
    quant_map: Float[Array, " 16"] | None = None,
    through: str | None = None,
) -> Float[Array, "out in"]:
    """quant_map[code] · absmax of the element's block in float32, rounded to `through` unless None, then to `dtype`.

    Args:
        codes: uint8, packed, flat or in any shape.
        absmax: float32, one a block, flat or in any shape.
        shape: (out, in) of the matrix.
        dtype: of the result.
        order: "bitsandbytes" or "split".
        quant_map: the sixteen values, float32; NF4's by default.
        through: the dtype that the weight decodes to, "bfloat16" or "float16", if another than `dtype`.
    """
    size = shape[0] * shape[1]
    table = jnp.asarray(NF4_VALUES if quant_map is None else quant_map)
    values = table[unpack(codes, size, order).astype(jnp.int32)]
    scales = absmax.reshape(-1)[np.arange(size) // BLOCK]
    return round_through(values * scales, through).astype(dtype).reshape(shape)
