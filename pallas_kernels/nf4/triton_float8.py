"""NF4 to the transposed matrix in float8_e4m3fn with Pallas-Triton, split order.

A block's table is made once for each row, in four words; a word of eight codes becomes two words of elements; and of
four neighbouring rows' words each of their four columns becomes a word of the result. So Triton moves words alone, and
is free to choose which thread holds which.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, UInt8

from pallas_kernels.nf4 import ptx
from pallas_kernels.nf4.codebook import BLOCK, BLOCK_BYTES

#: Rows of a word of the result, bytes of a word of codes, and words of a block's row.
ROWS = 4
WORDS = BLOCK_BYTES // 4


# Under jit of its own, so that the layers of an unrolled model lower the kernel once and not once each.
@functools.partial(jax.jit, static_argnames=("shape", "rows", "interpret"))
def dequantize_transposed(
    codes: UInt8[Array, "..."],
    absmax: Float[Array, "blocks out"],
    *,
    shape: tuple[int, int],
    rows: int,
    interpret: bool = False,
) -> Float[Array, "in out"]:
    """Decode a matrix and transpose it.

    Args:
        codes: uint8, split order, out·in / 2 of them.
        absmax: float32, by block of a row and by row; no product with NF4's values exceeds 448.
        shape: (out, in); out is a multiple of `rows`, in one of 64.
        rows: of a tile, a power of two.
        interpret: run on any device, in jax.numpy.
    """
    out, columns = shape
    blocks, quads = columns // BLOCK, rows // ROWS
    words = jax.lax.bitcast_convert_type(codes.reshape(out // ROWS, ROWS, columns // 8, 4), jnp.int32)
    transposed = pl.pallas_call(
        functools.partial(_kernel, interpret=interpret),
        out_shape=jax.ShapeDtypeStruct((blocks, 2, WORDS, 4, out // ROWS), jnp.int32),
        grid=(blocks, out // rows),
        in_specs=[
            pl.BlockSpec((quads, ROWS, WORDS), lambda block, tile: (tile, 0, block)),
            pl.BlockSpec((1, quads, ROWS), lambda block, tile: (block, tile, 0)),
        ],
        out_specs=pl.BlockSpec((1, 2, WORDS, 4, quads), lambda block, tile: (block, 0, 0, 0, tile)),
        compiler_params=pltriton.CompilerParams(num_warps=rows // 64, num_stages=1),
        interpret=interpret,
        name="nf4_dequantize_transposed",
    )(words, absmax.reshape(blocks, out // ROWS, ROWS))
    return jax.lax.bitcast_convert_type(transposed, jnp.float8_e4m3fn).reshape(columns, out)


def _kernel(words_ref, absmax_ref, out_ref, *, interpret: bool):
    words = [words_ref[:, row, :] for row in range(ROWS)]
    absmax = [absmax_ref[0, :, row] for row in range(ROWS)]
    shape = words[0].shape
    if interpret:
        columns = ptx.columns_in_jax(words, [jnp.broadcast_to(scale[:, None], shape) for scale in absmax])
    else:
        tables = [[_words(ptx.table(index), [], [scale]) for index in range(4)] for scale in absmax]
        wide = [[jnp.broadcast_to(part[:, None], shape) for part in table] for table in tables]
        columns = []
        for half in ptx.HALVES:
            decode = ptx.lookup_in_table(half)
            rows = [_words(decode, [word, *table], []) for word, table in zip(words, wide, strict=True)]
            columns += [_words(ptx.column(byte), rows, []) for byte in range(4)]
    for number, column in enumerate(columns):
        out_ref[0, number // 4, :, number % 4, :] = column.T


def _words(text: str, words: list[Array], scales: list[Array]) -> Array:
    """The result of assembly that takes words, or scales, one by one."""
    [result] = pltriton.elementwise_inline_asm(
        text,
        args=[*words, *scales],
        constraints=",".join(["=r"] + ["r"] * len(words) + ["f"] * len(scales)),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct((words or scales)[0].shape, jnp.int32)],
    )
    return result
