"""`ptx.lookup` on the registers of a Mosaic kernel."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from pallas_kernels.nf4 import ptx


def look_up_word(word: ir.Value, scale: ir.Value, dtype: DTypeLike) -> tuple[Sequence[ir.Value], Sequence[ir.Value]]:
    """The low and the high elements of four bytes of one block, each in ptx.RESULTS[dtype] registers.

    Args:
        word: i32, the four bytes.
        scale: f32, the block's absmax.
        dtype: bfloat16, float16 or float32.
    """
    name = jnp.dtype(dtype).name
    count, constraint = ptx.RESULTS[name]
    constraints = ",".join([f"={constraint}"] * (2 * count) + ["r", "f"])
    result_type = ir.F32Type.get() if constraint == "f" else ir.IntegerType.get_signless(32)
    results = ir.Type.parse(f"!llvm.struct<({', '.join([str(result_type)] * (2 * count))})>")
    decoded = llvm.inline_asm(results, [word, scale], ptx.lookup(name, ptx.HALVES), constraints, asm_dialect=0)
    elements = [
        llvm.extractvalue(result_type, decoded, [position])  # pyright: ignore[reportArgumentType]
        for position in range(2 * count)
    ]
    return elements[:count], elements[count:]


def words_of(packed: ir.Value) -> list[ir.Value]:
    """The 32-bit words of a vector of bytes."""
    [num_bytes] = ir.VectorType(packed.type).shape
    words = vector.bitcast(ir.VectorType.get((num_bytes // 4,), ir.IntegerType.get_signless(32)), packed)
    return [vector.extract(words, [], [index]) for index in range(num_bytes // 4)]


def joined(registers: Sequence[ir.Value], dtype: DTypeLike) -> ir.Value:
    """One vector of the elements that registers hold in order."""
    element = mgpu.utils.dtype_to_ir_type(jnp.dtype(dtype))
    whole = vector.from_elements(ir.VectorType.get((len(registers),), registers[0].type), registers)
    return vector.bitcast(ir.VectorType.get((len(registers) * 4 // jnp.dtype(dtype).itemsize,), element), whole)
