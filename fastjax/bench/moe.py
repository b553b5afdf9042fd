"""Speed of a mixture's parts on this device: products over groups, 4-bit experts, the whole block.

Tokens are routed at random, so that groups are uneven. Products stand beside the vendor's with groups of one size,
which is what an even routing would allow, and beside torch's where it is installed with CUDA. The block is a Qwen3-MoE
block, router to weighted sum, forward and backward, without attention and without gradients of its weights.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from fastjax.bench import moe_torch
from fastjax.bench.nf4 import packed_weights
from fastjax.bench.results import make_table, save
from fastjax.bench.timing import Program, Timing, measure
from fastjax.lora.experts import Arrays, Block, routed_experts
from fastjax.lora.rank_products import Part
from fastjax.quantization import NF4Weight
from fastjax.quantization.mxfp4 import MXFP4Weight
from pallas_kernels import dispatch
from pallas_kernels.grouped_matmul import grouped_matmul, grouped_matmul_dw, grouped_matmul_dx, grouped_nf4_matmul
from pallas_kernels.grouped_matmul.implementations import DW, DX, MATMUL
from pallas_kernels.grouped_matmul.shapes import BENCHMARK, BLOCK, FEW, Shape
from pallas_kernels.moe_routing import Order, RouterSettings, combine, route, sort_by_expert

Operation = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class MoeCase:
    """Settings of the measurement.

    Attributes:
        parts: of "products", "formats", "few" (4-bit experts with few rows) and "block".
        shapes: of the products.
        few: of 4-bit experts with few rows.
        block: of the block: out is the width of gate and up together, in the model's.
        ranks: of the adapters on the block's experts; 0: none.
        dtype: of the activations.
        rounds: runs; their median counts.
    """

    parts: tuple[str, ...] = ("products", "formats", "few", "block")
    shapes: tuple[Shape, ...] = BENCHMARK
    few: Shape = FEW
    block: Shape = BLOCK
    ranks: tuple[int, ...] = (0, 16)
    dtype: str = "bfloat16"
    rounds: int = 9


@dataclasses.dataclass(frozen=True)
class MoeResult:
    """One line of the table.

    Attributes:
        shape: of the measured part.
        operation: its name.
        implementation: of it, or the peer.
        microseconds: median.
        best: smallest.
        worst: largest.
        teraflops_per_second: of the large products; None for other operations.
        source: method of timing.
    """

    shape: Shape
    operation: str
    implementation: str
    microseconds: float
    best: float
    worst: float
    teraflops_per_second: float | None
    source: str


class _Routed(NamedTuple):
    """Tokens, matrices, gradients and the order of the routed rows."""

    x: jax.Array
    rows_of_x: jax.Array
    w: jax.Array
    dy: jax.Array
    order: Order


def run(case: MoeCase | None = None, output: Path | None = None, console: Console | None = None) -> list[MoeResult]:
    """Measure, show a table a part, write a file.

    Args:
        case: the settings; the defaults suit a GPU.
        output: JSON file for the case, the device and the results; None: no file.
        console: for the tables.

    Returns:
        The lines of the tables.
    """
    case, console, results = case or MoeCase(), console or Console(), []
    measured = {
        "products": lambda: [line for shape in case.shapes for line in _products(case, shape)],
        "formats": lambda: [line for shape in case.shapes for line in _formats(case, shape)],
        "few": lambda: _formats(case, case.few),
        "block": lambda: _blocks(case),
    }
    for part in case.parts:
        found = measured[part]()
        console.print(_table(case, part, found))
        results += found
    save(output, results, console, case=dataclasses.asdict(case))
    return results


def random_order(shape: Shape, key: jax.Array) -> Order:
    """The order of a random routing.

    Args:
        shape: tokens and experts.
        key: random state.
    """
    logits = jax.random.normal(key, (shape.tokens, shape.experts))
    return sort_by_expert(jax.lax.top_k(logits, shape.experts_per_token)[1], shape.experts)


def _routed(case: MoeCase, shape: Shape) -> _Routed:
    keys = jax.random.split(jax.random.key(0), 4)

    @jax.jit
    def draw():
        x = jax.random.normal(keys[0], (shape.tokens, shape.into), case.dtype)
        w = jax.random.normal(keys[1], (shape.experts, shape.out, shape.into), case.dtype) * 0.02
        dy = jax.random.normal(keys[2], (shape.rows, shape.out), case.dtype)
        order = random_order(shape, keys[3])
        return _Routed(x, x[order.rows], w.astype(case.dtype), dy, order)

    return draw()


def _products(case: MoeCase, shape: Shape) -> list[MoeResult]:
    x, sorted_x, w, dy, order = _routed(case, shape)
    sizes, rows = order.group_sizes, order.rows
    passes: dict[str, tuple[Any, Callable[..., Any], tuple[Any, ...]]] = {
        "forward": (MATMUL, grouped_matmul, (sorted_x, w, sizes)),
        "forward, gathered": (MATMUL, _gathered(grouped_matmul), (x, w, sizes, rows)),
        "gradient in x": (DX, grouped_matmul_dx, (dy, w, sizes)),
        "gradient in w": (DW, grouped_matmul_dw, (dy, sorted_x, sizes)),
        "gradient in w, gathered": (DW, _gathered(grouped_matmul_dw), (dy, x, sizes, rows)),
    }
    operations: dict[tuple[str, str], Operation] = {}
    for name, (registry, function, arguments) in passes.items():
        for implementation in registry.implementations:
            if implementation == "xla":  # a product of all rows with every expert's matrix
                continue
            forced = functools.partial(function, implementation=implementation)
            try:
                jax.eval_shape(forced, *arguments)
            except NotImplementedError:
                continue
            operations[name, implementation] = (forced, arguments)
    even = sorted_x[: shape.rows // shape.experts * shape.experts].reshape(shape.experts, -1, shape.into)
    operations["even groups", "vendor"] = (lambda x, w: jnp.einsum("xmk,xnk->xmn", x, w), (even, w))
    found = _measured(case, operations)
    del x, sorted_x, w, dy, even
    found |= moe_torch.products(shape, case.dtype, jax.device_get(sizes), case.rounds)
    return [_line(shape, *names, timing, shape.flops) for names, timing in found.items()]


def _gathered(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda first, second, sizes, rows, **options: function(first, second, sizes, rows=rows, **options)


def _formats(case: MoeCase, shape: Shape) -> list[MoeResult]:
    """The product with experts in 16 and in 4 bits, as models compute it."""
    x, _, w, _, order = _routed(case, shape)
    [(codes, absmax)] = packed_weights((shape.experts * shape.out, shape.into), 1)
    packed = NF4Weight(
        codes.reshape(shape.experts, shape.out, -1),
        absmax.reshape(shape.experts, shape.out, -1),
        *[None] * 4,
        shape=(shape.out, shape.into),
        parts=(shape.out,),
        dtype=case.dtype,
    )
    micro = MXFP4Weight(
        packed.codes,
        jnp.full((shape.experts, shape.out, shape.into // 32), 127, jnp.uint8),
        shape=(shape.out, shape.into),
        dtype=case.dtype,
    )
    sizes, rows = order.group_sizes, order.rows

    def product(weight, x, sizes, rows):
        return weight.grouped_matmul(x, sizes, rows=rows)

    operations: dict[tuple[str, str], Operation] = {
        ("16 bits", ""): (_gathered(grouped_matmul), (x, w, sizes, rows)),
        ("NF4", ""): (product, (packed, x, sizes, rows)),
        ("NF4, decoded first", ""): (
            lambda weight, x, sizes, rows: grouped_nf4_matmul(
                x,
                weight.codes,
                weight.absmax,
                sizes,
                shape=weight.shape,
                rows=rows,
                weight_dtype=case.dtype,
                implementation="decode_first",
            ),
            (packed, x, sizes, rows),
        ),
        ("MXFP4", ""): (product, (micro, x, sizes, rows)),
    }
    found = _measured(case, operations)
    return [_line(shape, *names, timing, shape.flops) for names, timing in found.items()]


def _blocks(case: MoeCase) -> list[MoeResult]:
    shape = case.block
    features, width = shape.out // 2, shape.into
    keys = iter(jax.random.split(jax.random.key(0), 12))

    def draw(*sizes: int, dtype: str = case.dtype) -> jax.Array:
        return (0.02 * jax.random.normal(next(keys), sizes)).astype(dtype)

    x, dout = 50 * draw(shape.tokens, width), 50 * draw(shape.tokens, width)
    router = draw(shape.experts, width, dtype="float32")
    gate_up, down = draw(shape.experts, shape.out, width), draw(shape.experts, width, features)
    settings = RouterSettings(shape.experts_per_token, normalize=True)

    def pass_of(block: Block):
        def forward(x, matrices, router, gate_up, down):
            chosen = route(jnp.matmul(x.astype(jnp.float32), router.T), settings)
            arrays = Arrays(gate_up, None, down, None, matrices)
            return routed_experts(block, x, chosen.weights, chosen.experts, arrays)

        def both(x, matrices, router, gate_up, down, dout):
            y, pullback = jax.vjp(lambda x, matrices: forward(x, matrices, router, gate_up, down), x, matrices)
            return y, pullback(dout)

        return both

    operations: dict[tuple[str, str], Operation] = {}
    for rank in case.ranks:
        parts = Part("gate_up_proj", shape.out, rank, 2.0), Part("down_proj", width, rank, 2.0)
        matrices = {
            part.name: (
                draw(shape.experts, rank, into, dtype="float32"),
                draw(shape.experts, part.rows, rank, dtype="float32"),
            )
            for part, into in zip(parts, (width, features), strict=True)
            if rank
        }
        block = Block(shape.experts, "silu", None, *parts)
        operations["block", f"r={rank}" if rank else "frozen"] = (
            pass_of(block),
            (x, matrices, router, gate_up, down, dout),
        )

    def movement(x, router, y, dout):
        """All of the block but its products: routing, the weighted sum, the gradients of both."""

        def forward(x, y):
            chosen = route(jnp.matmul(x.astype(jnp.float32), router.T), settings)
            return combine(y, chosen.weights, sort_by_expert(chosen.experts, shape.experts))

        out, pullback = jax.vjp(forward, x, y)
        return out, pullback(dout)

    operations["routing and weighted sum", ""] = (movement, (x, router, draw(shape.rows, width), dout))
    flops = 3 * shape.flops  # gate and up, and half as much for down; forward and backward in x
    found = _measured(case, operations)
    return [_line(shape, name, of, timing, flops if name == "block" else None) for (name, of), timing in found.items()]


def _measured(case: MoeCase, operations: dict[tuple[str, str], Operation]) -> dict[tuple[str, str], Timing]:
    names = {f"operation_{number}": key for number, key in enumerate(operations)}
    programs = [Program(name, *operations[key], 1) for name, key in names.items()]
    timings = measure(programs, case.rounds)
    return {names[name]: timing for name, timing in timings.items()}


def _line(shape: Shape, operation: str, implementation: str, timing: Timing, flops: float | None) -> MoeResult:
    return MoeResult(
        shape=shape,
        operation=operation,
        implementation=implementation,
        microseconds=timing.median * 1e6,
        best=timing.best * 1e6,
        worst=timing.worst * 1e6,
        teraflops_per_second=None if flops is None else flops / timing.median / 1e12,
        source=timing.source,
    )


def _table(case: MoeCase, part: str, results: Sequence[MoeResult]) -> Table:
    title = f"Mixtures: {part} · {case.dtype} · {dispatch.target()} · jax {jax.__version__}"
    sources = ", ".join(dict.fromkeys(line.source for line in results))
    table = make_table(title, ("shape", "", "by"), ("µs", "best–worst", "TFLOP/s"), f"time by {sources}")
    for line in results:
        table.add_row(
            str(line.shape),
            line.operation,
            line.implementation,
            f"{line.microseconds:,.0f}",
            f"{line.best:,.0f}–{line.worst:,.0f}",
            "" if line.teraflops_per_second is None else f"{line.teraflops_per_second:,.0f}",
        )
    return table
