"""Speed of decoding NF4 weights and of multiplying by them on this device.

Everything reads and writes memory that is not in the cache: it goes over several weights, together at least 256 MiB
packed, and a decode's results are larger still. Bandwidth counts codes, scales and result once each; the ceiling
beside it is the bandwidth of an element-wise kernel that reads and writes equally much. Products stand beside the
vendor's with a weight in 16 bits. Where the device multiplies in float8, decodes to it are there too, and products as
training computes them: x rounded, W decoded, both multiplied.
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
from fastjax.bench.options import DTYPES, option
from fastjax.bench.tables import Bench
from fastjax.bench.timing import Case, Row
from pallas_kernels import dispatch, float8, nf4

IMPLEMENTATIONS = ("fused", "mosaic", "triton", "xla")
#: Fewest rows of x for products in float8: with fewer ones the decode is most of the time.
LEAST_ROWS = 512


@dataclasses.dataclass(frozen=True)
class NF4Settings:
    """Settings of the measurement."""

    shape: tuple[int, ...] = option((4096, 14336, 14336, 4096), "out and in of a weight, once or more")
    dtypes: tuple[str, ...] = option(DTYPES, "of the decoded weight", choices=DTYPES)
    rows: tuple[int, ...] = option(
        (8192, 2048, 512, 64, 16, 1), "of x in the products and their gradients; nothing: no products", nargs="*"
    )
    dtype: str = option("bfloat16", "of the products", choices=DTYPES)
    cold_bytes: int = option(256 * 2**20, "packed bytes of the weights that are taken in turn")
    rounds: int = option(9, "runs of which the median counts")


def tables(settings: NF4Settings) -> Iterator[tuple[str, list[Case]]]:
    """For each shape the decodes, then the products with each number of rows."""
    for shape in zip(settings.shape[::2], settings.shape[1::2], strict=True):
        title = f"NF4 · {shape[0]}×{shape[1]} · cold cache"
        packed = packed_weights(shape, max(2, -(-settings.cold_bytes // (math.prod(shape) // 2))))
        yield title, [_copy(settings, shape), *_decodes(settings, shape, packed)]
        for rows in settings.rows:
            cases = [line for gradient in (False, True) for line in _products(settings, shape, packed, rows, gradient)]
            yield f"{title} · {rows:,} rows", cases


def packed_weights(shape: tuple[int, int], count: int) -> list[tuple[jax.Array, jax.Array]]:
    """Random packed weights on the device: (codes uint8 [out, in/2] in split order, absmax float32 [out, in/64]).

    Args:
        shape: (out, in); in is a multiple of 64.
        count: how many.
    """

    @jax.jit
    def draw(key):
        first, second = jax.random.split(key)
        codes = jax.random.bits(first, (shape[0], shape[1] // 2), jnp.uint8)
        return codes, jax.random.uniform(second, (shape[0], shape[1] // 64), jnp.float32, 0.01, 0.1)

    return [draw(key) for key in jax.random.split(jax.random.key(0), count)]


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
    return {"shape": shape, "operation": operation, "implementation": implementation, "dtype": dtype, "rows": rows}


def _copy(settings: NF4Settings, shape: tuple[int, int]) -> Case:
    """An element-wise kernel over arrays whose bytes read and written add up to those of a bfloat16 decode."""
    length = max(1, decode_bytes(shape, "bfloat16") // 8)
    count = max(2, -(-settings.cold_bytes // (4 * length)))
    arrays = tuple(jnp.arange(length, dtype=jnp.uint32) * np.uint32(i + 1) for i in range(count))
    labels = _labels(shape, "copy", "xla", "uint32")
    return Case(labels, lambda *xs: [x ^ np.uint32(0x5A5A5A5A) for x in xs], arrays, count, nbytes=8 * length)


def _decodes(
    settings: NF4Settings, shape: tuple[int, int], packed: list[tuple[jax.Array, jax.Array]]
) -> Iterator[Case]:
    count = len(packed)
    for dtype in settings.dtypes:
        moved = decode_bytes(shape, dtype)
        for name in IMPLEMENTATIONS[1:]:
            decode = functools.partial(nf4.dequantize, shape=shape, dtype=dtype, implementation=name)
            labels = _labels(shape, "decode", name, dtype)
            yield Case(labels, _each(decode), (None, *packed), count, nbytes=moved)
        for name, timed in torch_peers.nf4(shape, dtype, count).items():
            yield Case(_labels(shape, "decode", name, dtype), timed, nbytes=moved)
    moved = decode_bytes(shape, "float8_e4m3fn")
    for name in IMPLEMENTATIONS[1:] if in_float8() else ():
        decode = functools.partial(nf4.dequantize_float8, shape=shape, implementation=name)
        yield Case(_labels(shape, "decode", name, "float8"), _each(decode), (None, *packed), count, nbytes=moved)


def _products(
    settings: NF4Settings, shape: tuple[int, int], packed: list[tuple[jax.Array, jax.Array]], rows: int, gradient: bool
) -> Iterator[Case]:
    """The product of x and Wᵀ, or of x and W as in the gradient."""
    count, flops = len(packed), 2.0 * rows * math.prod(shape)
    operation = "gradient" if gradient else "product"
    x = jax.random.normal(jax.random.key(1), (rows, shape[0 if gradient else 1]), settings.dtype)
    decode = functools.partial(nf4.dequantize, shape=shape, dtype=settings.dtype, implementation="xla")
    dense = jax.jit(_each(decode))(None, *packed)
    for name in IMPLEMENTATIONS:
        product = product_of(shape, name, gradient)
        yield Case(_labels(shape, operation, name, settings.dtype, rows), _each(product), (x, *packed), count, flops)
    arguments = (x, *((matrix,) for matrix in dense))
    labels = _labels(shape, operation, "dense", settings.dtype, rows)
    yield Case(labels, _each(_dense_product(gradient)), arguments, count, flops)
    for name, timed in torch_peers.nf4(shape, settings.dtype, count, rows, gradient).items():
        yield Case(_labels(shape, operation, name, settings.dtype, rows), timed, flops=flops)
    if not in_float8() or settings.dtype != "bfloat16" or rows < LEAST_ROWS:
        return

    def in_8_bits(x, codes, absmax):
        matrix, scales = nf4.dequantize_float8(codes, absmax, shape=shape, transposed=gradient)
        return float8.matmul(*float8.quantize_rows(x), jax.lax.optimization_barrier(matrix), scales)

    labels = _labels(shape, operation, "float8", settings.dtype, rows)
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
    "Time the decoding of NF4 weights by every implementation that this device has, and products with them and their "
    "gradients, out of a cold cache. The defaults suit a GPU.",
    NF4Settings,
    tables,
    {"": "operation", "by": "implementation", "dtype": "dtype"},
    {
        "GB/s": ("gigabytes_per_second", ",.0f"),
        "TFLOP/s": ("teraflops_per_second", ",.1f"),
        "×dense": ("of_dense", ".2f"),
    },
    {
        "of_dense": (
            lambda row: {name: row[name] for name in ("shape", "operation", "rows")} | {"implementation": "dense"},
            lambda row, dense: dense["microseconds"] / row["microseconds"],
        )
    },
)
