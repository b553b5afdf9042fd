"""`ptx.lookup` on the registers of a Mosaic kernel."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.nf4 import ptx
from pallas_kernels.nf4.codebook import NF4_VALUES


def look_up_word(
    word: ir.Value, scale: ir.Value, dtype: DTypeLike, through: str | None
) -> tuple[Sequence[ir.Value], Sequence[ir.Value]]:
    """The low and the high elements of four bytes of one block, each in ptx.RESULTS[dtype] registers.

    Args:
        word: i32, the four bytes.
        scale: f32, the block's absmax.
        dtype: bfloat16, float16 or float32.
        through: dtype that values are rounded to before a 16-bit `dtype`; None for none.
    """
    name = jnp.dtype(dtype).name
    count, constraint = ptx.RESULTS[name]
    elements = _assemble(ptx.lookup(name, ptx.HALVES, through), [word, scale], "rf", [constraint] * (2 * count))
    return elements[:count], elements[count:]


def look_up_in_planes(word: ir.Value, planes: Sequence[ir.Value]) -> tuple[Sequence[ir.Value], Sequence[ir.Value]]:
    """`look_up_word` by a table of 16-bit values that is there already.

    Args:
        word: i32, the four bytes.
        planes: by `shared_planes`.
    """
    elements = _assemble(ptx.lookup_in_planes(), [word, *planes], "r" * 9, ["r"] * 4)
    return elements[:2], elements[2:]


def shared_planes(
    scale: ir.Value, values: Sequence[ir.Value], dtype: DTypeLike, through: str | None
) -> Sequence[ir.Value]:
    """The table of a block that four neighbouring lanes decode, a fourth made by each: eight registers.

    Args:
        scale: f32, the block's absmax.
        values: the lane's `values_of_lane`.
        dtype: bfloat16 or float16.
        through: as in `look_up_word`.
    """
    text = ptx.shared_planes(jnp.dtype(dtype).name, through)
    return _assemble(text, [scale, *values], "fffff", ["r"] * 8, has_side_effects=True)


def values_of_lane(lane: ir.Value) -> Sequence[ir.Value]:
    """The lane's four of NF4's values, f32, for its part of the table: the first four for lane 0 of four, and so on."""
    f32 = ir.F32Type.get()
    i32 = ir.IntegerType.get_signless(32)
    quarters = np.asarray(NF4_VALUES).reshape(4, 4).tolist()
    chosen = [mgpu.utils.c(value, f32) for value in quarters[0]]
    for quarter in range(1, 4):
        here = arith.cmpi(arith.CmpIPredicate.eq, lane, mgpu.utils.c(quarter, i32))
        chosen = [
            arith.select(here, mgpu.utils.c(value, f32), before)
            for value, before in zip(quarters[quarter], chosen, strict=True)
        ]
    return chosen


def table_of(scale: ir.Value) -> list[ir.Value]:
    """The table of a block in float8_e4m3fn: four registers.

    Args:
        scale: f32, the block's absmax over the scale.
    """
    return [_assemble(ptx.table(index), [scale], "f", ["r"])[0] for index in range(4)]


def decoded_columns(words: Sequence[ir.Value], tables: Sequence[Sequence[ir.Value]]) -> Sequence[ir.Value]:
    """Eight columns of four rows in float8_e4m3fn, a register each: four of low elements, four of high ones.

    Args:
        words: i32, four bytes of codes of each row.
        tables: the rows' `table_of`.
    """
    operands = [*words, *(part for table in tables for part in table)]
    return _assemble(ptx.columns(), operands, "r" * len(operands), ["r"] * 8)


def largest_of_warp(value: ir.Value) -> ir.Value:
    """The largest i32 of a warp, in all its lanes. All lanes must take part."""
    text = "redux.sync.max.s32 $0, $1, 0xffffffff;"
    return _assemble(text, [value], "r", ["r"], has_side_effects=True)[0]


def lane_and_warp() -> tuple[ir.Value, ir.Value]:
    """The thread's lane, and the number of its warp in its warpgroup."""
    i32 = ir.IntegerType.get_signless(32)
    thread = mgpu.utils.thread_idx()
    warp = arith.andi(arith.shrui(thread, mgpu.utils.c(5, i32)), mgpu.utils.c(3, i32))
    return arith.andi(thread, mgpu.utils.c(31, i32)), warp


def vector_of(registers: Sequence[ir.Value]) -> ir.Value:
    """One vector of registers of one kind."""
    return vector.from_elements(ir.VectorType.get((len(registers),), registers[0].type), registers)


def _assemble(
    text: str, operands: Sequence[ir.Value], inputs: str, outputs: Sequence[str], *, has_side_effects: bool = False
) -> Sequence[ir.Value]:
    """The results of assembly, registers "r" (i32) or "f" (f32) all of one kind."""
    result_type = ir.F32Type.get() if outputs[0] == "f" else ir.IntegerType.get_signless(32)
    one = len(outputs) == 1  # in LLVM not a structure then
    results = result_type if one else ir.Type.parse(f"!llvm.struct<({', '.join([str(result_type)] * len(outputs))})>")
    constraints = ",".join([*(f"={kind}" for kind in outputs), *inputs])
    struct = llvm.inline_asm(results, operands, text, constraints, has_side_effects=has_side_effects, asm_dialect=0)
    if one:
        return [struct]  # pyright: ignore[reportReturnType]
    return [
        llvm.extractvalue(result_type, struct, [position])  # pyright: ignore[reportArgumentType]
        for position in range(len(outputs))
    ]


def words_of(packed: ir.Value) -> list[ir.Value]:
    """The 32-bit words of a vector of bytes."""
    [num_bytes] = ir.VectorType(packed.type).shape
    words = vector.bitcast(ir.VectorType.get((num_bytes // 4,), ir.IntegerType.get_signless(32)), packed)
    return [vector.extract(words, [], [index]) for index in range(num_bytes // 4)]


def joined(registers: Sequence[ir.Value], dtype: DTypeLike) -> ir.Value:
    """One vector of the elements that registers hold in order."""
    element = mgpu.utils.dtype_to_ir_type(jnp.dtype(dtype))
    length = len(registers) * 4 // jnp.dtype(dtype).itemsize
    return vector.bitcast(ir.VectorType.get((length,), element), vector_of(registers))
