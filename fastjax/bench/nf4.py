"""How fast NF4 weights are decoded and multiplied on this device.

Every decode reads and writes memory that is not in the cache: it goes over several weights, together at least 256 MiB
packed, and what it writes is larger still. Bandwidth counts codes, scales and result once each; the ceiling beside it
is what a plain element-wise kernel moves when it reads and writes as much as each other.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from fastjax.bench.timing import Program, Timing, measure
from pallas_kernels import dispatch, nf4
from pallas_kernels.nf4.shapes import BENCHMARK

IMPLEMENTATIONS = ("mosaic", "triton", "xla")


@dataclasses.dataclass(frozen=True)
class NF4Case:
    """What is measured.

    Attributes:
        shape: (out, in) of the weight.
        dtypes: of the decoded weight.
        rows: rows of x for the products, one measurement each; empty for none.
        dtype: of the products.
        cold_bytes: packed bytes that the decodes go over in turn.
        rounds: runs of which the median counts.
    """

    shape: tuple[int, int] = BENCHMARK.shape
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")
    rows: tuple[int, ...] = (8192, 2048, 512, 16, 1)
    dtype: str = "bfloat16"
    cold_bytes: int = 256 * 2**20
    rounds: int = 9


@dataclasses.dataclass(frozen=True)
class NF4Result:
    """One line of the table.

    Attributes:
        operation: "decode", "product" or "copy".
        implementation: of the decode; "dense" for the product with a weight in 16 bits.
        dtype: of the result.
        rows: of x, for a product.
        microseconds: median.
        best: smallest.
        worst: largest.
        gigabytes_per_second: bytes that must move over the median; None for a product.
        teraflops_per_second: of a product; None otherwise.
        source: how it was timed.
    """

    operation: str
    implementation: str
    dtype: str
    rows: int | None
    microseconds: float
    best: float
    worst: float
    gigabytes_per_second: float | None
    teraflops_per_second: float | None
    source: str


def run(case: NF4Case | None = None, output: Path | None = None, console: Console | None = None) -> list[NF4Result]:
    """Measure, show a table, write a file.

    Args:
        case: what to measure; the defaults suit a GPU.
        output: JSON file for the case, the device and the results; None: no file.
        console: for the table.

    Returns:
        The lines of the table.
    """
    case, console = case or NF4Case(), console or Console()
    results = [_copy(case), *_decodes(case), *(line for rows in case.rows for line in _products(case, rows))]
    console.print(_table(case, results))
    if output is not None:
        facts: dict[str, Any] = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
        facts |= {"case": dataclasses.asdict(case), "results": [dataclasses.asdict(line) for line in results]}
        output.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        console.print(f"written to {output}", highlight=False)
    return results


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


def available(shape: tuple[int, int], dtype: str) -> list[str]:
    """The implementations that can decode such a weight on this device."""
    found = []
    for name in IMPLEMENTATIONS:
        spec = jax.ShapeDtypeStruct((shape[0], shape[1] // 2), jnp.uint8)
        scales = jax.ShapeDtypeStruct((shape[0], shape[1] // 64), jnp.float32)
        try:
            jax.eval_shape(
                lambda c, a, name=name: nf4.dequantize(c, a, shape=shape, dtype=dtype, implementation=name),
                spec,
                scales,
            )
        except NotImplementedError:
            continue
        found.append(name)
    return found


def decode_bytes(shape: tuple[int, int], dtype: str) -> int:
    """What a decode must read and write: codes, scales, result."""
    size = math.prod(shape)
    return size // 2 + 4 * (size // 64) + size * jnp.dtype(dtype).itemsize


def _copy(case: NF4Case) -> NF4Result:
    """An element-wise kernel over arrays whose bytes read and written add up to those of a bfloat16 decode."""
    length = max(1, decode_bytes(case.shape, "bfloat16") // 8)
    count = max(2, -(-case.cold_bytes // (4 * length)))
    arrays = tuple(jnp.arange(length, dtype=jnp.uint32) * np.uint32(i + 1) for i in range(count))
    program = Program("copy", lambda *xs: [x ^ np.uint32(0x5A5A5A5A) for x in xs], arrays, count)
    timing = measure([program], case.rounds)["copy"]
    return _line(timing, "copy", "xla", "uint32", moved=8 * length)


def _decodes(case: NF4Case) -> list[NF4Result]:
    packed = packed_weights(case.shape, _cold_count(case))
    lines = []
    for dtype in case.dtypes:
        programs = [
            Program(f"decode_{name}_{dtype}", _decode_all(case.shape, dtype, name), tuple(packed), len(packed))
            for name in available(case.shape, dtype)
        ]
        timings = measure(programs, case.rounds)
        for program in programs:
            name = program.name.split("_")[1]
            lines.append(_line(timings[program.name], "decode", name, dtype, moved=decode_bytes(case.shape, dtype)))
    return lines


def _decode_all(shape: tuple[int, int], dtype: str, implementation: str):
    def decode(*packed):
        return [nf4.dequantize(*one, shape=shape, dtype=dtype, implementation=implementation) for one in packed]

    return decode


def _products(case: NF4Case, rows: int) -> list[NF4Result]:
    packed = packed_weights(case.shape, _cold_count(case))
    x = jax.random.normal(jax.random.key(1), (rows, case.shape[1]), case.dtype)

    def product_of(implementation: str):
        def product(x, *packed):
            return [nf4.matmul(x, *one, shape=case.shape, implementation=implementation) for one in packed]

        return product

    def dense_product(x, *weights):
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        dims = (((1,), (1,)), ((), ()))
        return [jax.lax.dot_general(x, weight, dims, precision=precision) for weight in weights]

    dense = jax.jit(_decode_all(case.shape, case.dtype, "xla"))(*packed)
    programs = [
        Program(f"product_{name}", product_of(name), (x, *packed), len(packed))
        for name in available(case.shape, case.dtype)
    ]
    programs.append(Program("product_dense", dense_product, (x, *dense), len(packed)))
    timings = measure(programs, case.rounds)
    flops = 2 * rows * math.prod(case.shape)
    return [
        _line(timings[p.name], "product", p.name.split("_")[1], case.dtype, rows=rows, flops=flops) for p in programs
    ]


def _cold_count(case: NF4Case) -> int:
    """Weights that together exceed any cache."""
    return max(2, -(-case.cold_bytes // (math.prod(case.shape) // 2)))


def _line(timing: Timing, operation, implementation, dtype, *, moved=None, rows=None, flops=None) -> NF4Result:
    return NF4Result(
        operation=operation,
        implementation=implementation,
        dtype=dtype,
        rows=rows,
        microseconds=timing.median * 1e6,
        best=timing.best * 1e6,
        worst=timing.worst * 1e6,
        gigabytes_per_second=None if moved is None else moved / timing.median / 1e9,
        teraflops_per_second=None if flops is None else flops / timing.median / 1e12,
        source=timing.source,
    )


def _table(case: NF4Case, results: Sequence[NF4Result]) -> Table:
    out, columns = case.shape
    title = f"NF4 · {out}×{columns} · cold cache · {dispatch.target()} · jax {jax.__version__}"
    table = Table(title=title, caption=f"median of {case.rounds}, time by {results[-1].source}")
    for name in ("", "by", "dtype"):
        table.add_column(name)
    for name in ("rows", "µs", "best–worst", "GB/s", "TFLOP/s"):
        table.add_column(name, justify="right")
    for line in results:
        table.add_row(
            line.operation,
            line.implementation,
            line.dtype,
            "" if line.rows is None else f"{line.rows:,}",
            f"{line.microseconds:,.1f}",
            f"{line.best:,.1f}–{line.worst:,.1f}",
            "" if line.gigabytes_per_second is None else f"{line.gigabytes_per_second:,.0f}",
            "" if line.teraflops_per_second is None else f"{line.teraflops_per_second:,.1f}",
        )
    return table
