"""NF4 dequantisation with Pallas-Triton: Ampere, Ada and newer (compute capability 8.0 and more), split order.

The whole kernel is element-wise in Triton's eyes: the assembly turns the four bytes of a register into four elements of
one half, and Triton chooses which thread holds which bytes.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from pallas_kernels.nf4 import ptx
from pallas_kernels.nf4.codebook import BLOCK, BLOCK_BYTES


# Under jit of its own, so that the layers of an unrolled model lower the kernel once and not once each.
@functools.partial(jax.jit, static_argnames=("dtype", "tile", "through", "interpret"))
def dequantize(
    codes: UInt8[Array, "blocks 32"],
    absmax: Float[Array, " blocks"],
    *,
    dtype: DTypeLike,
    tile: int,
    through: str | None = None,
    interpret: bool = False,
) -> Float[Array, "blocks 64"]:
    """Decode whole blocks, at least `tile` of them.

    Args:
        codes: uint8, split order.
        absmax: float32.
        dtype: bfloat16, float16 or float32.
        tile: blocks of one, as `config.triton_blocks`.
        through: dtype that values are rounded to before a 16-bit `dtype`; None for none.
        interpret: run on any device, in jax.numpy.
    """
    blocks = absmax.size
    return pl.pallas_call(
        functools.partial(_kernel, size=tile, through=through, interpret=interpret),
        out_shape=jax.ShapeDtypeStruct((blocks, BLOCK), dtype),
        grid=(pl.cdiv(blocks, tile),),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="nf4_dequantize",
    )(codes, absmax)


def _kernel(codes_ref, absmax_ref, out_ref, *, size: int, through: str | None, interpret: bool):
    # On a GPU nothing keeps a tile inside of an array. The last one is moved back to end with it: it repeats what its
    # neighbour writes.
    rows = pl.ds(jnp.minimum(pl.program_id(0) * size, out_ref.shape[0] - size), size)
    codes, absmax = codes_ref[rows, :], absmax_ref[rows][:, None]
    low, high = (look_up(codes, absmax, out_ref.dtype, half, through, interpret) for half in ptx.HALVES)
    out_ref[rows, :BLOCK_BYTES] = low
    out_ref[rows, BLOCK_BYTES:] = high


def look_up(
    codes: UInt8[Array, "blocks 32"],
    absmax: Float[Array, "blocks 1"],
    dtype: DTypeLike,
    half: str,
    through: str | None,
    interpret: bool,
) -> Float[Array, "blocks 32"]:
    """One half of whole blocks inside a kernel; arguments as of `dequantize`.

    Four codes of a register are taken for one block's. So they are in the order in which they come from memory; a
    kernel that multiplies what it looks up must keep Triton from looking up in the order that products want instead.
    """
    if interpret:
        return ptx.lookup_in_jax(codes, absmax, dtype, half, through)
    name = jnp.dtype(dtype).name
    count, constraint = ptx.RESULTS[name]
    constraints = [f"={constraint}"] * count + ["r"] + ["f"] * 4  # four codes a word, so absmax comes four times
    [decoded] = pltriton.elementwise_inline_asm(
        ptx.lookup(name, (half,), through),
        args=[codes, jnp.broadcast_to(absmax, codes.shape)],
        constraints=",".join(constraints),
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(codes.shape, dtype)],
    )
    return decoded
