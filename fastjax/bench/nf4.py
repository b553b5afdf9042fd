"""Speed of decoding NF4 weights and of multiplying by them on this device.

Everything reads and writes memory that is not in the cache: it goes over several weights, together at least 256 MiB
packed, and a decode's results are larger still. Bandwidth counts codes, scales and result once each; the ceiling
beside it is the bandwidth of an element-wise kernel that reads and writes equally much. Products stand
beside the vendor's with a weight in 16 bits.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from fastjax.bench import nf4_float8, nf4_torch
from fastjax.bench.results import make_table, save
from fastjax.bench.timing import Program, Timing, measure
from pallas_kernels import dispatch, nf4
from pallas_kernels.nf4.shapes import BENCHMARK

IMPLEMENTATIONS = ("fused", "mosaic", "triton", "xla")


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


@dataclasses.dataclass(frozen=True)
class NF4Result:
    """One line of the table.

    Attributes:
        shape: (out, in) of the weight.
        operation: "copy", "decode", "transpose" (a decode to the transpose), "round" (rows of x to float8), "product"
            or "gradient" (in x, of the product).
        implementation: of it; "dense" for the product with a weight in 16 bits, "float8" and so on for those of
            `nf4_float8`, "bitsandbytes" and "unsloth" where these are installed.
        dtype: of the result.
        rows: of x, for a product, and for rounding them.
        microseconds: median.
        best: smallest.
        worst: largest.
        gigabytes_per_second: bytes that must move over the median; None for a product.
        teraflops_per_second: of a product; None otherwise.
        of_dense: the dense product's time over this one's; None for other operations.
        source: method of timing.
    """

    shape: tuple[int, int]
    operation: str
    implementation: str
    dtype: str
    rows: int | None
    microseconds: float
    best: float
    worst: float
    gigabytes_per_second: float | None
    teraflops_per_second: float | None
    of_dense: float | None
    source: str


def run(case: NF4Case | None = None, output: Path | None = None, console: Console | None = None) -> list[NF4Result]:
    """Measure, with a line for each figure as it is there; show a table for each shape, write a file.

    Args:
        case: the settings; the defaults suit a GPU.
        output: JSON file for the case, the device and the results; None: no file.
        console: for the tables.

    Returns:
        The lines of the tables.
    """
    case, console = case or NF4Case(), console or Console()
    results = []
    for line in _lines(case):
        results.append(line)
        console.print(_told(line), highlight=False)
    for shape in case.shapes:
        console.print(_table(case, shape, [line for line in results if line.shape == shape]))
    save(output, results, console, case=dataclasses.asdict(case))
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


def available(shape: tuple[int, int], dtype: str, rows: int | None = None, gradient: bool = False) -> list[str]:
    """The implementations that serve on this device.

    Args:
        shape: (out, in) of the weight.
        dtype: of the result.
        rows: of x, for a product; None: those of the dequantisation.
        gradient: of the product in x.
    """
    codes = jax.ShapeDtypeStruct((shape[0], shape[1] // 2), jnp.uint8)
    absmax = jax.ShapeDtypeStruct((shape[0], shape[1] // 64), jnp.float32)
    found = []
    for name in IMPLEMENTATIONS:
        try:
            if rows is not None:
                x = jax.ShapeDtypeStruct((rows, shape[0 if gradient else 1]), dtype)
                jax.eval_shape(_product_of(shape, name, gradient), x, codes, absmax)
            elif name != "fused":
                jax.eval_shape(_decode_of(shape, dtype, name), codes, absmax)
            else:
                continue
        except NotImplementedError:
            continue
        found.append(name)
    return found


def decode_bytes(shape: tuple[int, int], dtype: str) -> int:
    """Bytes that a decode reads and writes: codes, scales, result."""
    size = math.prod(shape)
    return size // 2 + 4 * (size // 64) + size * jnp.dtype(dtype).itemsize


def _lines(case: NF4Case) -> Iterator[NF4Result]:
    yield _copy(case)
    for shape in case.shapes:
        yield from _decodes(case, shape)
        for rows, gradient in itertools.product(case.rows, (False, True)):
            yield from _products(case, shape, rows, gradient)


def _copy(case: NF4Case) -> NF4Result:
    """An element-wise kernel over arrays whose bytes read and written add up to those of a bfloat16 decode."""
    length = max(1, decode_bytes(case.shapes[0], "bfloat16") // 8)
    count = max(2, -(-case.cold_bytes // (4 * length)))
    arrays = tuple(jnp.arange(length, dtype=jnp.uint32) * np.uint32(i + 1) for i in range(count))
    program = Program("copy", lambda *xs: [x ^ np.uint32(0x5A5A5A5A) for x in xs], arrays, count)
    timing = measure([program], case.rounds)["copy"]
    return _line(timing, case.shapes[0], "copy", "xla", "uint32", moved=8 * length)


def _decodes(case: NF4Case, shape: tuple[int, int]) -> Iterator[NF4Result]:
    packed = packed_weights(shape, _cold_count(case, shape))
    for dtype in case.dtypes:
        programs = [
            Program(f"decode_{name}_{dtype}", _each(_decode_of(shape, dtype, name)), (None, *packed), len(packed))
            for name in available(shape, dtype)
        ]
        timings = measure(programs, case.rounds)
        found = {program.name.split("_")[1]: timings[program.name] for program in programs}
        found |= nf4_torch.decodes(shape, dtype, len(packed), case.rounds)
        moved = decode_bytes(shape, dtype)
        yield from (_line(timing, shape, "decode", name, dtype, moved=moved) for name, timing in found.items())
    for transposed in (False, True) if nf4_float8.served() else ():
        found = nf4_float8.decodes(shape, transposed, packed, case.rounds)
        operation, moved = "transpose" if transposed else "decode", decode_bytes(shape, "float8_e4m3fn")
        yield from (_line(timing, shape, operation, name, "float8", moved=moved) for name, timing in found.items())


def _products(case: NF4Case, shape: tuple[int, int], rows: int, gradient: bool) -> list[NF4Result]:
    packed = packed_weights(shape, _cold_count(case, shape))
    x = jax.random.normal(jax.random.key(1), (rows, shape[0 if gradient else 1]), case.dtype)
    dense = jax.jit(_each(_decode_of(shape, case.dtype, "xla")))(None, *packed)
    programs = [
        Program(f"product_{name}", _each(_product_of(shape, name, gradient)), (x, *packed), len(packed))
        for name in available(shape, case.dtype, rows, gradient)
    ]
    programs.append(Program("product_dense", _each(_dense_product(gradient)), (x, *((d,) for d in dense)), len(packed)))
    float8 = nf4_float8.served() and case.dtype == "bfloat16" and rows >= nf4_float8.LEAST_ROWS
    rounded = nf4_float8.rounding(x, case.rounds) if float8 else {}
    programs += nf4_float8.products(shape, gradient, x, packed) if float8 else []
    timings = measure(programs, case.rounds)
    found = {program.name.split("_")[1]: timings[program.name] for program in programs}
    found |= nf4_torch.products(shape, case.dtype, rows, gradient, len(packed), case.rounds)
    operation, reference = "gradient" if gradient else "product", timings["product_dense"].median
    moved = nf4_float8.rounding_bytes(x.shape)
    return [
        *(_line(timing, shape, "round", name, "float8", rows=rows, moved=moved) for name, timing in rounded.items()),
        *(_line(t, shape, operation, name, case.dtype, rows=rows, dense=reference) for name, t in found.items()),
    ]


def _each(function: Callable[..., jax.Array]) -> Callable[..., list[jax.Array]]:
    """The function of x, unless that is None, and of every one of the weights."""

    def run(x, *weights):
        return [function(*weight) if x is None else function(x, *weight) for weight in weights]

    return run


def _decode_of(shape: tuple[int, int], dtype: str, implementation: str) -> Callable[..., jax.Array]:
    return functools.partial(nf4.dequantize, shape=shape, dtype=dtype, implementation=implementation)


def _product_of(shape: tuple[int, int], implementation: str, gradient: bool) -> Callable[..., jax.Array]:
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


def _cold_count(case: NF4Case, shape: tuple[int, int]) -> int:
    """Weights that together exceed any cache."""
    return max(2, -(-case.cold_bytes // (math.prod(shape) // 2)))


def _line(timing: Timing, shape, operation, implementation, dtype, *, moved=None, rows=None, dense=None) -> NF4Result:
    return NF4Result(
        shape=shape,
        operation=operation,
        implementation=implementation,
        dtype=dtype,
        rows=rows,
        microseconds=timing.median * 1e6,
        best=timing.best * 1e6,
        worst=timing.worst * 1e6,
        gigabytes_per_second=None if moved is None else moved / timing.median / 1e9,
        teraflops_per_second=None
        if rows is None or moved is not None
        else 2 * rows * math.prod(shape) / timing.median / 1e12,
        of_dense=None if dense is None else dense / timing.median,
        source=timing.source,
    )


def _told(line: NF4Result) -> str:
    """A figure in a line of its own."""
    rows = "" if line.rows is None else f" of {line.rows:,} rows"
    rates = [(line.gigabytes_per_second, "GB/s"), (line.teraflops_per_second, "TFLOP/s")]
    figures = [
        f"{_written(line.microseconds)} µs",
        *(f"{rate:,.0f} {unit}" for rate, unit in rates if rate is not None),
    ]
    what = f"{line.shape[0]}×{line.shape[1]} {line.operation}{rows} by {line.implementation}, {line.dtype}"
    return f"{what}: {', '.join(figures)}"


def _table(case: NF4Case, shape: tuple[int, int], results: Sequence[NF4Result]) -> Table:
    title = f"NF4 · {shape[0]}×{shape[1]} · cold cache · {dispatch.target()} · jax {jax.__version__}"
    numbers = ("rows", "µs", "best–worst", "GB/s", "TFLOP/s", "× dense")
    others: dict[str, list[str]] = {}
    for line in results:
        names = others.setdefault(line.source, [])
        if line.implementation not in names:
            names.append(line.implementation)
    own = results[0].source
    times = [own, *(f"{', '.join(names)} by {source}" for source, names in others.items() if source != own)]
    caption = f"median of {case.rounds}, time by {'; '.join(times)}"
    table = make_table(title, ("", "by", "dtype"), numbers, caption)
    for line in results:
        table.add_row(
            line.operation,
            line.implementation,
            line.dtype,
            "" if line.rows is None else f"{line.rows:,}",
            _written(line.microseconds),
            f"{_written(line.best)}–{_written(line.worst)}",
            "" if line.gigabytes_per_second is None else f"{line.gigabytes_per_second:,.0f}",
            "" if line.teraflops_per_second is None else f"{line.teraflops_per_second:,.1f}",
            "" if line.of_dense is None else f"{line.of_dense:.2f}",
        )
    return table


def _written(microseconds: float) -> str:
    return f"{microseconds:,.{0 if microseconds >= 1000 else 1}f}"
