"""Dequantisation to the transposed matrix in float8_e4m3fn.

A thread decodes a block of each of four neighbouring rows, whose bytes it joins to 64 words, a word a column. Lanes lie
along the rows, so a warp writes 128 neighbouring bytes of a column at a time, and threads exchange nothing: no shared
memory, no barrier. The warps of a thread block take neighbouring blocks, so that whole cache lines of codes are read
together.

The scales are made here too, from maxima of parts of the columns, which each warp reduces once more for its block: only
those have to be known of the whole matrix before.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxtyping import Array, Float, Int32, UInt8

from pallas_kernels.nf4 import ptx
from pallas_kernels.nf4.codebook import BLOCK, BLOCK_BYTES
from pallas_kernels.nf4.mosaic_sm90.lookup import (
    decoded_columns,
    lane_and_warp,
    largest_of_warp,
    table_of,
    vector_of,
    words_of,
)
from pallas_kernels.nf4.triton_scales import scales_of

#: Rows of a word of the result; bytes of a load.
_QUAD, _LOAD = 4, 16
_WARPS, _LANES = 4, 32
#: Rows and columns of the matrix that a thread block decodes.
ROWS, COLUMNS = _LANES * _QUAD, _WARPS * BLOCK

# A block's scale for all its columns, a warp for each block.
_TILING = plgpu.Tiling(((COLUMNS,), (BLOCK,), (2,)))
_SCALES = plgpu.Layout.TILED(_TILING, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


# Under jit of its own, so that the layers of an unrolled model lower the kernel once and not once each.
@functools.partial(jax.jit, static_argnames=("interpret",))
def dequantize_transposed(
    codes: UInt8[Array, "out bytes"],
    absmax: Float[Array, "blocks out"],
    largest: Int32[Array, "blocks parts"],
    *,
    interpret: Any = None,
) -> tuple[Float[Array, "in out"], Float[Array, " in"]]:
    """Decode a matrix and transpose it.

    Args:
        codes: uint8, split order; in = 2 · bytes is a multiple of 64 and at least `COLUMNS`, out of 4 and at least
            `ROWS`.
        absmax: float32, transposed, so that a lane reads its four rows' at once.
        largest: bits of the largest absmax of parts of a column of blocks; parts are a multiple of 32.
        interpret: parameters of Mosaic's interpreter, to run on any device; None compiles.

    Returns:
        The transposed matrix over the scales, and the scales of its rows.
    """
    blocks, out = absmax.shape
    kernel = plgpu.kernel(
        functools.partial(_kernel, interpreted=interpret is not None),
        out_type=(
            jax.ShapeDtypeStruct((blocks * BLOCK, out // _QUAD), jnp.int32),
            jax.ShapeDtypeStruct((blocks * BLOCK,), jnp.float32),
        ),
        # Thread blocks that run together write whole rows of the result.
        grid=(pl.cdiv(blocks, _WARPS), pl.cdiv(out, ROWS)),
        grid_names=("columns", "rows"),
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True,  # nothing here is both read and written
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        kernel_name="nf4_dequantize_transposed",
        interpret=interpret,
    )
    words, scales = kernel(codes, absmax, largest)
    return lax.bitcast_convert_type(words, jnp.float8_e4m3fn).reshape(blocks * BLOCK, out), scales


def _kernel(codes_ref, absmax_ref, largest_ref, out_ref, scales_ref, *, interpreted: bool):
    # The last tile of rows or columns is moved back to end with the array: it repeats what its neighbour writes.
    (blocks, out), row_tile = absmax_ref.shape, lax.axis_index("rows")
    word = lax.min(row_tile * _LANES, jnp.int32(out // _QUAD - _LANES))
    block = lax.min(lax.axis_index("columns") * _WARPS, jnp.int32(blocks - _WARPS))
    rows, own_blocks, columns = pl.ds(word * _QUAD, ROWS), pl.ds(block, _WARPS), pl.ds(block * BLOCK, COLUMNS)
    codes_ref = codes_ref.at[rows, pl.ds(block * BLOCK_BYTES, _WARPS * BLOCK_BYTES)]
    absmax_ref, largest_ref = absmax_ref.at[own_blocks, rows], largest_ref.at[own_blocks]
    out_ref, scales_ref = out_ref.at[columns, pl.ds(word, _LANES)], scales_ref.at[columns]
    if interpreted:  # neither assembly nor layouts there
        scales, inverse = scales_of(jnp.repeat(jnp.max(largest_ref[...], axis=1), BLOCK))
        out_ref[...] = _decode_in_jax(codes_ref[...], absmax_ref[...], inverse)
    else:
        scales, inverse = scales_of(_largest(largest_ref))
        _decode(codes_ref, absmax_ref, inverse, out_ref)

    @pl.when(row_tile == 0)
    def _():
        scales_ref[...] = scales


def _largest(largest_ref):
    """The largest part of each block, for each of the block's columns."""
    shape, layout = (COLUMNS,), _SCALES.to_mgpu()

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=_SCALES)
    )
    def reduce(_, parts):
        lane, warp = lane_and_warp()
        [_, count] = ir.MemRefType(parts.type).shape
        parts = _LanePointer(parts, [(warp, 1), (lane, 1)])
        own = [vector.extract(parts.load((0, first), 1), [], [0]) for first in range(0, count, _LANES)]
        largest = largest_of_warp(functools.reduce(arith.maxsi, own))
        registers = np.full(layout.registers_shape(shape), vector_of([largest, largest]), object)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)

    return reduce(largest_ref)  # pyright: ignore[reportCallIssue]  # the decorator takes the context away


def _decode(codes_ref, absmax_ref, inverse, out_ref):
    """Write the tile's columns, each word as it is found, so that few registers hold them."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), _SCALES, plgpu.RefType()))
    def decode(_, codes, absmax, inverse, out):
        scale = vector.extract(inverse.registers.flat[0], [], [0])
        lane, warp = lane_and_warp()
        codes = _LanePointer(codes, [(lane, _QUAD), (warp, BLOCK_BYTES)])
        absmax = _LanePointer(absmax, [(warp, 1), (lane, _QUAD)])
        out = _LanePointer(out, [(warp, BLOCK), (lane, 1)])

        # All of a lane's codes are in flight from here on.
        own, rows = absmax.load((0, 0), _QUAD), range(_QUAD)
        pieces = [[words_of(codes.load((row, at), _LOAD)) for row in rows] for at in range(0, BLOCK_BYTES, _LOAD)]
        tables = [table_of(arith.mulf(vector.extract(own, [], [row]), scale)) for row in rows]
        words = [word for piece in pieces for word in zip(*piece, strict=True)]
        for place, of_rows in enumerate(words):
            for number, four in enumerate(decoded_columns(of_rows, tables)):
                # Low nibbles are a block's first 32 columns, high ones its last.
                out.store((4 * place + number % 4 + BLOCK_BYTES * (number // 4), 0), vector_of([four]))

    decode(codes_ref, absmax_ref, inverse, out_ref)  # pyright: ignore[reportCallIssue]  # the decorator takes the context away


def _decode_in_jax(codes, absmax, inverse):
    count, rows = absmax.shape
    blocks = codes.reshape(rows * count, BLOCK_BYTES)
    scaled = (absmax.T * inverse[None, ::BLOCK]).reshape(rows * count, 1)
    halves = [ptx.lookup_in_jax(blocks, scaled, jnp.float8_e4m3fn, half) for half in ptx.HALVES]
    matrix = jnp.concatenate(halves, axis=1).reshape(rows, count * BLOCK)
    return lax.bitcast_convert_type(matrix.T.reshape(count * BLOCK, rows // _QUAD, _QUAD), jnp.int32)


class _LanePointer:
    """A lane's place in a reference to global memory, from which offsets are known while compiling."""

    def __init__(self, ref: ir.Value, places: Sequence[tuple[ir.Value, int]]):
        """By dimension: a number of the lane's and the elements that it counts."""
        kind, i32 = ir.MemRefType(ref.type), ir.IntegerType.get_signless(32)
        self.strides, _ = kind.get_strides_and_offset()
        self.element = kind.element_type
        terms = [
            arith.muli(number, mgpu.utils.c(size * stride, i32))
            for (number, size), stride in zip(places, self.strides, strict=True)
        ]
        pointer = llvm.addrspacecast(ir.Type.parse("!llvm.ptr<1>"), mgpu.utils.memref_ptr(ref))
        self.pointer = mgpu.utils.getelementptr(pointer, [functools.reduce(arith.addi, terms)], self.element)

    def _at(self, place: tuple[int, int]) -> ir.Value:
        offset = sum(number * stride for number, stride in zip(place, self.strides, strict=True))
        return mgpu.utils.getelementptr(self.pointer, [offset], self.element)

    def load(self, place: tuple[int, int], length: int) -> ir.Value:
        """A vector of neighbouring elements."""
        kind = ir.VectorType.get((length,), self.element)
        return llvm.load(kind, self._at(place), alignment=length * mgpu.utils.bytewidth(self.element))

    def store(self, place: tuple[int, int], values: ir.Value) -> None:
        [length] = ir.VectorType(values.type).shape
        llvm.store(values, self._at(place), alignment=length * mgpu.utils.bytewidth(self.element))
