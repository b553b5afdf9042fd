"""tanh for the soft cap of logits, in float32 accuracy at few special-function instructions.

tanh(x) = 1 − 2 / (exp(2x) + 1). The hardware's own tanh is good to 11 bits only, and the exponential and the
reciprocal of each logit, beside the softmax's exponential, would take longer than the products. Four reciprocals are
therefore one: 1/a = b·c·d / (a·b·c·d). The rest takes the place of the search for a row's greatest logit, which the cap
bounds.
"""

import struct

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from pallas_kernels.attention.call import Options
from pallas_kernels.attention.mosaic_sm90.common import LOG2E

_LARGEST = 30.0
"""Largest argument of exp2: tanh is 1 in float32 from 26 on, and four such exponentials do not overflow."""
_LARGEST_POWER = 100.0
"""Largest power of two of a weight: times values and summed over a row it must not overflow, nor its inverse vanish."""


def capped(s: Array, options: Options, *, interpreted: bool) -> tuple[Array, float, Array | None]:
    """Logits up to a factor, that factor (exp2 takes their product), and the derivative of the cap.

    Args:
        s: products of queries and keys, float32 [rows, columns] in the accumulators' layout.
        options: of the call.
        interpreted: whether this runs in the interpreter, which knows no assembly.
    """
    cap = options.logits_soft_cap
    if cap is None:
        return s, options.scale * LOG2E, None
    size = cap * LOG2E
    tangent = scaled_tanh(s, options.scale / cap, size, interpreted=interpreted)
    return tangent, 1.0, 1.0 - tangent * tangent * (1 / size**2)


def bounded(dtype: DTypeLike, options: Options) -> bool:
    """Whether the cap bounds exp of the logits to bfloat16's exponents, so that no maximum need be subtracted."""
    cap = options.logits_soft_cap
    return cap is not None and cap * LOG2E <= _LARGEST_POWER and jnp.dtype(dtype) == jnp.bfloat16


def scaled_tanh(x: Array, scale: float, size: float, *, interpreted: bool) -> Array:
    """`size` times the hyperbolic tangent of scale · x, float32 [rows, columns] in the accumulators' layout.

    Args:
        x: the argument up to its scale.
        scale: its scale.
        size: factor of the tangent.
        interpreted: whether this runs in the interpreter, which knows no assembly.
    """
    factor = 2 * LOG2E * scale
    if interpreted:
        return size - 2.0 * size / (jnp.exp2(jnp.minimum(x * factor, _LARGEST)) + 1.0)
    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=result)
    def of_registers(_, x):
        pairs, assembly = x.registers.reshape(-1), _assembly(factor, size)
        tangents = np.empty_like(pairs)
        for first in range(0, pairs.size, 2):
            tangents[first : first + 2] = _of_four(pairs[first], pairs[first + 1], assembly)
        return mgpu.FragmentedArray(_registers=tangents.reshape(x.registers.shape), _layout=x.layout, _is_signed=None)

    return of_registers(x)  # pyright: ignore[reportCallIssue]  # the decorator takes the context away


def _of_four(first: ir.Value, second: ir.Value, assembly: str) -> list[ir.Value]:
    """Two vectors of two elements."""
    float32 = ir.F32Type.get()
    operands = [vector.extract(pair, [], [index]) for pair in (first, second) for index in range(2)]
    struct_type = ir.Type.parse("!llvm.struct<(f32, f32, f32, f32)>")
    packed = llvm.inline_asm(struct_type, operands, assembly, "=f,=f,=f,=f,f,f,f,f", asm_dialect=0)
    numbers = [llvm.extractvalue(float32, packed, [index]) for index in range(4)]  # pyright: ignore[reportArgumentType]
    pair_type = ir.VectorType.get((2,), float32)
    return [vector.from_elements(pair_type, numbers[:2]), vector.from_elements(pair_type, numbers[2:])]


def _assembly(factor: float, size: float) -> str:
    """PTX for four elements: $4 to $7 in, $0 to $3 out."""

    def constant(number: float) -> str:
        return f"0f{struct.unpack('>I', struct.pack('>f', number))[0]:08X}"

    lines = ["{", ".reg .f32 a0, a1, a2, a3, p, q, r, rp, rq;"]
    for index in range(4):
        lines += [
            f"mul.ftz.f32 a{index}, ${4 + index}, {constant(factor)};",
            f"min.f32 a{index}, a{index}, {constant(_LARGEST)};",
            f"ex2.approx.ftz.f32 a{index}, a{index};",
            f"add.ftz.f32 a{index}, a{index}, {constant(1)};",
        ]
    lines += [
        "mul.ftz.f32 p, a0, a1;",
        "mul.ftz.f32 q, a2, a3;",
        "mul.ftz.f32 r, p, q;",
        "rcp.approx.ftz.f32 r, r;",
        "mul.ftz.f32 rp, r, q;",
        "mul.ftz.f32 rq, r, p;",
    ]
    for index, (half, other) in enumerate((("rp", "a1"), ("rp", "a0"), ("rq", "a3"), ("rq", "a2"))):
        lines.append(f"mul.ftz.f32 q, {half}, {other};")
        lines.append(f"fma.rn.ftz.f32 ${index}, q, {constant(-2 * size)}, {constant(size)};")
    return "\n".join([*lines, "}"])
