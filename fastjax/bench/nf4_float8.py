"""The work of `fastjax.bench.nf4` in float8: decoding in both orientations, rounding rows of x, and products.

A product is measured as training computes it ("float8": x rounded, W decoded, both multiplied), and by itself, of
operands that are there: with sums of the tensor cores' own precision ("float8alone") or partial sums promoted to
float32 as they go ("float8promoted").
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from fastjax.bench.timing import Program, Timing, measure
from pallas_kernels import dispatch, float8, nf4

IMPLEMENTATIONS = ("mosaic", "triton", "xla")
#: Fewest rows of x in the products: with fewer ones the decode is most of the time.
LEAST_ROWS = 512

Packed = Sequence[tuple[jax.Array, jax.Array]]


def served() -> bool:
    """Whether this device multiplies in float8: an NVIDIA GPU that has it, or a CPU, for tests."""
    device = dispatch.target()
    capability = device.compute_capability
    return device.platform == "cpu" or (capability is not None and capability >= (8, 9))


def decodes(shape: tuple[int, int], transposed: bool, packed: Packed, rounds: int) -> dict[str, Timing]:
    """Seconds of one decode, its scales included, by implementation.

    Args:
        shape: (out, in) of the weights.
        transposed: whether to their transposes.
        packed: codes and absmax of the weights that are taken in turn.
        rounds: runs; their median counts.
    """
    programs = []
    for name in IMPLEMENTATIONS:
        decode = functools.partial(nf4.dequantize_float8, shape=shape, transposed=transposed, implementation=name)
        try:
            jax.eval_shape(decode, *packed[0])
        except NotImplementedError:
            continue
        programs.append(Program(f"float8_{name}", _each(decode), tuple(packed), len(packed)))
    return {program.name.split("_")[1]: timing for program, timing in _timed(programs, rounds)}


def rounding(x: jax.Array, rounds: int) -> dict[str, Timing]:
    """Seconds to round the rows of x once, by implementation.

    Args:
        x: bfloat16.
        rounds: runs; their median counts.
    """
    programs, copies = [], [x + number for number in range(8)]
    for name in IMPLEMENTATIONS[1:]:
        quantize = functools.partial(float8.quantize_rows, implementation=name)
        try:
            jax.eval_shape(quantize, x)
        except NotImplementedError:
            continue
        programs.append(Program(f"round_{name}", _each(quantize), tuple((copy,) for copy in copies), len(copies)))
    return {program.name.split("_")[1]: timing for program, timing in _timed(programs, rounds)}


def products(shape: tuple[int, int], gradient: bool, x: jax.Array, packed: Packed) -> list[Program]:
    """The products to be measured beside those in 16 bits; their names end as their lines are called.

    Args:
        shape: (out, in) of the weights.
        gradient: of the product in x.
        x: bfloat16.
        packed: codes and absmax of the weights that are taken in turn.
    """
    decode = functools.partial(nf4.dequantize_float8, shape=shape, transposed=gradient)

    def whole(codes, absmax, x):
        matrix, scales = decode(codes, absmax)
        return float8.matmul(*float8.quantize_rows(x), jax.lax.optimization_barrier(matrix), scales)

    decoded = [jax.jit(decode)(*weight) for weight in packed]
    rounded = jax.jit(float8.quantize_rows)(x)
    found = [Program("product_float8", _each(whole), tuple((*weight, x) for weight in packed), len(packed))]
    for name, promoted in (("alone", False), ("promoted", True)):

        def alone(matrix, scales, codes, of_rows, promoted=promoted):
            return float8.matmul(codes, of_rows, matrix, scales, promoted=promoted)

        operands = tuple((*weight, *rounded) for weight in decoded)
        found.append(Program(f"product_float8{name}", _each(alone), operands, len(packed)))
    return found


def rounding_bytes(shape: tuple[int, ...]) -> int:
    """Bytes that rounding the rows of x reads and writes: bfloat16, codes, scales."""
    return shape[0] * (shape[1] * (jnp.dtype(jnp.bfloat16).itemsize + 1) + 4)


def _each(function: Callable[..., object]) -> Callable[..., list[object]]:
    return lambda *operands: [function(*own) for own in operands]


def _timed(programs: list[Program], rounds: int) -> list[tuple[Program, Timing]]:
    timings = measure(programs, rounds)
    return [(program, timings[program.name]) for program in programs]
