"""Speed of decoding NF4 weights and of multiplying by them on this device.

Everything reads and writes memory that is not in the cache: it goes over several weights, together at least 256 MiB
packed, and a decode's results are larger still. Bandwidth counts codes, scales and result once each; the ceiling
beside it is the bandwidth of an element-wise kernel that reads and writes equally much. Products stand beside the
vendor's with a weight in 16 bits. Where the device multiplies in float8, decodes to it in both orientations are there
too, the rounding of rows of x, and products as training computes them: x rounded, W decoded, both multiplied.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fastjax.bench import torch_peers
from fastjax.bench.tables import Bench, Beside, Case, Row, number, word
from pallas_kernels import dispatch, float8, nf4
from pallas_kernels.nf4.shapes import BENCHMARK

IMPLEMENTATIONS = ("fused", "mosaic", "triton", "xla")
#: Fewest rows of x for products in float8: with fewer ones the decode is most of the time.
LEAST_ROWS = 512


@dataclasses.dataclass(frozen=True)
class NF4Case:
    """Settings of the measurement.

    Attributes:
        shapes: (out, in) of the weights.
        dtypes: of the decoded weight.
        rows: rows of x for the products and their gradients, one measurement each; empty for none.
        dtype: of the products.
        cold_bytes: packed bytes of the weights that are taken in turn.
        rounds: runs; their median counts.
    """

    shapes: tuple[tuple[int, int], ...] = (BENCHMARK.shape, (BENCHMARK.shape[1], BENCHMARK.shape[0]))
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")
    rows: tuple[int, ...] = (8192, 2048, 512, 64, 16, 1)
    dtype: str = "bfloat16"
    cold_bytes: int = 256 * 2**20
    rounds: int = 9


def tables(case: NF4Case) -> Iterator[tuple[str, list[Case]]]:
    """For each shape the decodes, then the products with each number of rows.

    Args:
        case: the settings.
    """
    for shape in case.shapes:
        title = f"NF4 · {shape[0]}×{shape[1]} · cold cache"
        packed = packed_weights(shape, max(2, -(-case.cold_bytes // (math.prod(shape) // 2))))
        yield title, [_copy(case, shape), *_decodes(case, shape, packed)]
        for rows in case.rows:
            cases = [line for gradient in (False, True) for line in _products(case, shape, packed, rows, gradient)]
            yield f"{title} · {rows:,} rows", cases


def packed_weights(shape: tuple[int, int], count: int, seed: int = 0) -> list[tuple[jax.Array, jax.Array]]:
    """Random packed weights on the device: (codes uint8 [out, in/2] in split order, absmax float32 [out, in/64]).

    Args:
        shape: (out, in); in is a multiple of 64.
        count: how many.
        seed: of the random numbers.
    """

    @jax.jit
    def draw(key):
        first, second = jax.random.split(key)
        codes = jax.random.bits(first, (shape[0], shape[1] // 2), jnp.uint8)
        return codes, jax.random.uniform(second, (shape[0], shape[1] // 64), jnp.float32, 0.01, 0.1)

    return [draw(key) for key in jax.random.split(jax.random.key(seed), count)]


def decode_bytes(shape: tuple[int, int], dtype: str) -> int:
    """Bytes that a decode reads and writes: codes, scales, result."""
    size = math.prod(shape)
    return size // 2 + 4 * (size // 64) + size * jnp.dtype(dtype).itemsize


def in_float8() -> bool:
    """Whether this device multiplies in float8: an NVIDIA GPU that has it, or a CPU, for tests."""
    device = dispatch.target()
    capability = device.compute_capability
    return device.platform == "cpu" or (capability is not None and capability >= (8, 9))


def _labels(shape: tuple[int, int], operation: str, implementation: str, dtype: str, rows: int | None = None) -> Row:
    return {
        "shape": shape,
        "operation": operation,
        "implementation": implementation,
        "dtype": dtype,
        "rows": rows,
    }


def _copy(case: NF4Case, shape: tuple[int, int]) -> Case:
    """An element-wise kernel over arrays whose bytes read and written add up to those of a bfloat16 decode."""
    length = max(1, decode_bytes(shape, "bfloat16") // 8)
    count = max(2, -(-case.cold_bytes // (4 * length)))
    arrays = tuple(jnp.arange(length, dtype=jnp.uint32) * np.uint32(i + 1) for i in range(count))
    labels = _labels(shape, "copy", "xla", "uint32")
    return Case(labels, lambda *xs: [x ^ np.uint32(0x5A5A5A5A) for x in xs], arrays, count, nbytes=8 * length)


def _decodes(case: NF4Case, shape: tuple[int, int], packed: list[tuple[jax.Array, jax.Array]]) -> Iterator[Case]:
    count = len(packed)
    for dtype in case.dtypes:
        moved = decode_bytes(shape, dtype)
        for name in IMPLEMENTATIONS[1:]:
            decode = functools.partial(nf4.dequantize, shape=shape, dtype=dtype, implementation=name)
            labels = _labels(shape, "decode", name, dtype)
            yield Case(labels, _each(decode), (None, *packed), count, nbytes=moved)
        for name, timed in torch_peers.nf4_decodes(shape, dtype, count).items():
            yield Case(_labels(shape, "decode", name, dtype), timed, nbytes=moved)
    moved = decode_bytes(shape, "float8_e4m3fn")
    for operation in ("decode", "transpose") if in_float8() else ():
        for name in IMPLEMENTATIONS[1:]:
            options = {"transposed": operation == "transpose", "implementation": name}
            decode = functools.partial(nf4.dequantize_float8, shape=shape, **options)
            labels = _labels(shape, operation, name, "float8")
            yield Case(labels, _each(decode), (None, *packed), count, nbytes=moved)


def _products(
    case: NF4Case, shape: tuple[int, int], packed: list[tuple[jax.Array, jax.Array]], rows: int, gradient: bool
) -> Iterator[Case]:
    """The product of x and Wᵀ, or of x and W as in the gradient."""
    count, flops = len(packed), 2.0 * rows * math.prod(shape)
    operation = "gradient" if gradient else "product"
    x = jax.random.normal(jax.random.key(1), (rows, shape[0 if gradient else 1]), case.dtype)
    decode = functools.partial(nf4.dequantize, shape=shape, dtype=case.dtype, implementation="xla")
    dense = jax.jit(_each(decode))(None, *packed)
    for name in IMPLEMENTATIONS:
        product = product_of(shape, name, gradient)
        yield Case(_labels(shape, operation, name, case.dtype, rows), _each(product), (x, *packed), count, flops)
    arguments = (x, *((matrix,) for matrix in dense))
    labels = _labels(shape, operation, "dense", case.dtype, rows)
    yield Case(labels, _each(_dense_product(gradient)), arguments, count, flops)
    for name, timed in torch_peers.nf4_products(shape, case.dtype, rows, gradient, count).items():
        yield Case(_labels(shape, operation, name, case.dtype, rows), timed, flops=flops)
    if not in_float8() or case.dtype != "bfloat16" or rows < LEAST_ROWS:
        return
    copies = [(x + copy,) for copy in range(8)]
    moved = rows * (x.shape[1] * (x.dtype.itemsize + 1) + 4)  # bfloat16, codes, scales
    for name in IMPLEMENTATIONS[2:]:
        round_rows = functools.partial(float8.quantize_rows, implementation=name)
        labels = _labels(shape, "round", name, "float8", rows)
        yield Case(labels, _each(round_rows), (None, *copies), len(copies), nbytes=moved)

    def in_8_bits(x, codes, absmax):
        matrix, scales = nf4.dequantize_float8(codes, absmax, shape=shape, transposed=gradient)
        return float8.matmul(*float8.quantize_rows(x), jax.lax.optimization_barrier(matrix), scales)

    labels = _labels(shape, operation, "float8", case.dtype, rows)
    yield Case(labels, _each(in_8_bits), (x, *packed), count, flops)


def product_of(shape: tuple[int, int], implementation: str, gradient: bool) -> Callable[..., jax.Array]:
    """The product x Wᵀ of (x, codes, absmax), or its gradient in x of (dy, codes, absmax).

    Args:
        shape: (out, in) of the weight.
        implementation: of it.
        gradient: which of the two.
    """
    product = functools.partial(nf4.matmul, shape=shape, implementation=implementation)

    def pull_back(dy, codes, absmax):
        x = jnp.zeros((dy.shape[0], shape[1]), dy.dtype)
        return jax.vjp(lambda x: product(x, codes, absmax), x)[1](dy)[0]

    return pull_back if gradient else product


def _dense_product(gradient: bool) -> Callable[..., jax.Array]:
    def product(x, weight):
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        return jax.lax.dot_general(x, weight, (((1,), (0 if gradient else 1,)), ((), ())), precision=precision)

    return product


def _each(function: Callable[..., Any]) -> Callable[..., list[Any]]:
    """The function of x, unless that is None, and of every one of the weights."""

    def run(x, *weights):
        return [function(*weight) if x is None else function(x, *weight) for weight in weights]

    return run


BENCH = Bench(
    NF4Case,
    tables,
    {"": word("operation"), "by": word("implementation"), "dtype": word("dtype")},
    {
        "GB/s": number("gigabytes_per_second", ",.0f"),
        "TFLOP/s": number("teraflops_per_second", ",.1f"),
        "× dense": number("of_dense", ".2f"),
    },
    "microseconds",
    {
        "of_dense": Beside(
            lambda row: {name: row[name] for name in ("shape", "operation", "rows")} | {"implementation": "dense"},
            lambda row, dense: dense["microseconds"] / row["microseconds"],
        )
    },
)
