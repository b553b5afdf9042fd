"""The head and its loss, forward and backward to the input, beside the two matrix products alone.

Of a frozen head: the products over chunks of tokens without any loss between them are the floor; then the whole
operation by every implementation that the device has and by size of the chunks, with the temporaries that the compiler
plans. Last the kernel's part alone, over the logits of one chunk, by its block sizes: the time of the program that also
fills the logits, less that of the filling.
"""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from rich.console import Console
from rich.table import Table

from fastjax.bench.results import make_table, save
from fastjax.bench.timing import Program, Timing, compile_all, measure
from fastjax.errors import ConfigError
from pallas_kernels import dispatch
from pallas_kernels.cross_entropy import chunked_cross_entropy, triton, xla
from pallas_kernels.cross_entropy.config import Tiles
from pallas_kernels.cross_entropy.implementations import REGISTRY, Case
from pallas_kernels.cross_entropy.rows import Options

#: Block sizes of the kernel to compare.
CANDIDATES = tuple(Tiles(columns, warps, 1) for columns, warps in ((4096, 8), (4096, 16), (8192, 16), (8192, 32)))


@dataclasses.dataclass(frozen=True)
class LossCase:
    """Settings of the measurement.

    Attributes:
        tokens: rows and tokens a row.
        shape: width of the model, and words.
        chunks: tokens whose logits exist at once.
        implementations: of the loss; None: all that the device has.
        dtype: of activations, head and logits.
        rounds: runs; their median counts.
    """

    tokens: tuple[int, int] = (4, 2048)
    shape: tuple[int, int] = (4096, 128_256)
    chunks: tuple[int, ...] = (512, 1024, 2048)
    implementations: tuple[str, ...] | None = None
    dtype: str = "bfloat16"
    rounds: int = 9


@dataclasses.dataclass(frozen=True)
class LossResult:
    """One line of the table.

    Attributes:
        part: "products", "loss" or "rows".
        implementation: its name; of the kernel's rows with words a block and warps; None: products alone.
        chunk: tokens a chunk.
        milliseconds: median.
        best: smallest.
        worst: largest.
        over_products: milliseconds over the products of the same chunks; None where it is no loss.
        gigabytes_per_second: of rows, one read and one write of the logits; else None.
        temporary_bytes: the program's, as the compiler plans; None of rows.
        source: how it was timed.
    """

    part: str
    implementation: str | None
    chunk: int
    milliseconds: float
    best: float
    worst: float
    over_products: float | None
    gigabytes_per_second: float | None
    temporary_bytes: int | None
    source: str


def run(case: LossCase | None = None, output: Path | None = None, console: Console | None = None) -> list[LossResult]:
    """Measure, show a table, write a file.

    Args:
        case: the settings; the defaults suit a GPU.
        output: JSON file for the case, the device and the results; None: no file.
        console: for the table.

    Returns:
        The lines of the table.

    Raises:
        ConfigError: chunks that do not divide the tokens.
    """
    case, console = case or LossCase(), console or Console()
    batch, length = case.tokens
    for chunk in case.chunks:
        if chunk % batch or length % (chunk // batch):
            raise ConfigError(f"--chunks: expected parts of {batch}×{length} tokens, all rows in each, got {chunk}")
    listed = list(programs(case))
    compiled: dict[str, Any] = compile_all([program for *_, program in listed])
    for result in compiled.values():
        if isinstance(result, Exception):
            raise result
    timings = measure([program for *_, program in listed], case.rounds, compiled)
    results = []
    for part, implementation, chunk, program in listed:
        if part != "fill":
            base = {"rows": "fill", "loss": f"products_{chunk}"}.get(part)
            temporaries = None if part == "rows" else compiled[program.name].memory_analysis().temp_size_in_bytes
            over = None if base is None else timings[base]
            results.append(_line(case, part, implementation, chunk, timings[program.name], over, temporaries))
    console.print(_table(case, results))
    save(output, results, console, case=dataclasses.asdict(case))
    return results


def programs(case: LossCase) -> Iterator[tuple[str, str | None, int, Program]]:
    """(part, implementation, tokens a chunk, program) of everything that is timed.

    Args:
        case: the settings.
    """
    (batch, length), (width, vocab) = case.tokens, case.shape
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (batch, length, width), case.dtype)
    weight = jax.random.normal(keys[1], (vocab, width), case.dtype) * jnp.asarray(width**-0.5, case.dtype)
    targets = jax.random.randint(keys[2], (batch, length), 0, vocab, jnp.int32)
    reasons = REGISTRY.reasons(Case(dispatch.target(), (batch, 1, vocab), case.dtype))
    names = case.implementations or tuple(name for name, reason in reasons.items() if reason is None)
    for chunk in case.chunks:
        size = chunk // batch
        yield "products", None, chunk, Program(f"products_{chunk}", products(size), (hidden, weight), 1)
        for name in names:
            program = Program(f"loss_{name}_{chunk}", loss(size, name), (hidden, weight, targets), 1)
            yield "loss", name, chunk, program
    chunk = case.chunks[-1]
    arguments = (hidden.reshape(-1, width)[0, :1], targets.reshape(1, -1)[:, :chunk])
    yield "fill", None, chunk, Program("fill", rows(None, vocab), arguments, 1)
    for name in names:
        if name == "xla":
            yield "rows", name, chunk, Program("rows_xla", rows(xla.backward, vocab), arguments, 1)
            continue
        for tiles in CANDIDATES:

            def backward(logits, targets, options, tiles=tiles):
                return triton.backward(logits, targets, options, tiles)

            label = f"{tiles.columns}×{tiles.num_warps}"
            program = Program(f"rows_{tiles.columns}_{tiles.num_warps}", rows(backward, vocab), arguments, 1)
            yield "rows", f"{name} {label}", chunk, program


def loss(chunk_size: int, implementation: str) -> Callable[..., Any]:
    """Of (hidden, weight, targets): the sums, and the gradient of hidden.

    Args:
        chunk_size: places of the sequence at once.
        implementation: its name.
    """

    def summed(hidden, weight, targets):
        def project(trainable, frozen, piece):
            return jnp.einsum("bse,ve->bsv", piece, frozen)

        options = {"chunk_size": chunk_size, "implementation": implementation}
        sums = chunked_cross_entropy(project, (), weight, hidden, targets, **options)
        return sums.loss_sum, sums

    return jax.value_and_grad(summed, has_aux=True)


def products(chunk_size: int) -> Callable[..., Any]:
    """Of (hidden, weight): hidden · weightᵀ · weight, chunk by chunk.

    Args:
        chunk_size: places of the sequence at once.
    """

    def both(hidden, weight):
        def step(result, start):
            piece = lax.dynamic_slice_in_dim(hidden, start, chunk_size, axis=1)
            logits = jnp.einsum("bse,ve->bsv", piece, weight)
            back = jnp.einsum("bsv,ve->bse", logits, weight)
            return lax.dynamic_update_slice_in_dim(result, back, start, axis=1), None

        starts = jnp.arange(0, hidden.shape[1] - chunk_size + 1, chunk_size, dtype=jnp.int32)
        return lax.scan(step, jnp.zeros_like(hidden), starts)[0]

    return both


def rows(backward: Callable[..., Any] | None, vocab: int) -> Callable[..., Any]:
    """Of (a number, targets [1, N]): logits [1, N, V] that are filled with it, and what `backward` makes of them.

    Args:
        backward: of an implementation; None: the filling alone.
        vocab: words.
    """

    def filled(number, targets):
        logits = lax.optimization_barrier(jnp.broadcast_to(number[None, :, None], (*targets.shape, vocab)))
        return logits if backward is None else backward(logits, targets, Options())

    return filled


def _line(
    case: LossCase,
    part: str,
    implementation: str | None,
    chunk: int,
    timing: Timing,
    base: Timing | None,
    temporaries: int | None,
) -> LossResult:
    less = base.median if part == "rows" and base is not None else 0.0
    seconds = timing.median - less
    nbytes = 2 * chunk * case.shape[1] * jnp.dtype(case.dtype).itemsize
    return LossResult(
        part=part,
        implementation=implementation,
        chunk=chunk,
        milliseconds=seconds * 1e3,
        best=(timing.best - less) * 1e3,
        worst=(timing.worst - less) * 1e3,
        over_products=(timing.median - base.median) * 1e3 if part == "loss" and base is not None else None,
        gigabytes_per_second=nbytes / seconds / 1e9 if part == "rows" and seconds > 0 else None,
        temporary_bytes=temporaries,
        source=timing.source,
    )


def _table(case: LossCase, results: list[LossResult]) -> Table:
    (batch, length), (width, vocab) = case.tokens, case.shape
    title = (
        f"head and loss · {batch}×{length} tokens · {width}×{vocab} · {case.dtype} · {jax.devices()[0].device_kind} · "
        f"jax {jax.__version__}"
    )
    caption = f"to the gradient of the input, median of {case.rounds}, time by {results[-1].source}; rows: one chunk"
    numbers = ("chunk", "ms", "best–worst", "over products", "GB/s", "GiB")
    table = make_table(title, ("part", "by"), numbers, caption)
    for line in results:
        table.add_row(
            line.part,
            line.implementation or "",
            str(line.chunk),
            f"{line.milliseconds:.3f}",
            f"{line.best:.3f}–{line.worst:.3f}",
            "" if line.over_products is None else f"{line.over_products:+.3f}",
            "" if line.gigabytes_per_second is None else f"{line.gigabytes_per_second:,.0f}",
            "" if line.temporary_bytes is None else f"{line.temporary_bytes / 2**30:.3f}",
        )
    return table
