"""Speed of a mixture's parts on this device: products over groups, 4-bit experts, the whole block.

Tokens are routed at random, so that groups are uneven. Products stand beside the vendor's with groups of one size,
which is what an even routing would allow, and beside torch's where it is installed with CUDA. The block is a Qwen3-MoE
block, router to weighted sum, forward and backward, without attention and without gradients of its weights.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fastjax.bench import torch_peers
from fastjax.bench.lora import forward_and_backward
from fastjax.bench.options import DTYPES, option
from fastjax.bench.tables import Bench
from fastjax.bench.timing import Case
from fastjax.lora.experts import Block, Operands, routed_experts
from fastjax.lora.rank_products import PartSpec
from fastjax.quantization import MXFP4Weight, NF4Weight
from pallas_kernels.grouped_matmul import grouped_matmul, grouped_matmul_dw, grouped_matmul_dx
from pallas_kernels.grouped_matmul.api import DW, DX, MATMUL
from pallas_kernels.grouped_matmul.shapes import BENCHMARK, BLOCK, FEW, Shape
from pallas_kernels.moe_routing import Order, RouterSettings, route, sort_by_expert

#: Parts of the benchmark → the shapes at which they are measured. The block's `out` is gate and up together.
SHAPES = {"products": BENCHMARK, "formats": (*BENCHMARK, FEW), "block": (BLOCK,)}


@dataclasses.dataclass(frozen=True)
class MoeSettings:
    """Settings of the measurement."""

    parts: tuple[str, ...] = option(tuple(SHAPES), "products over groups, 4-bit experts, the block", choices=SHAPES)
    ranks: tuple[int, ...] = option((0, 16), "of the adapters on the block's experts; 0: none", type=int, metavar="R")
    dtype: str = option("bfloat16", "of the activations", choices=DTYPES)
    rounds: int = option(9, "runs of which the median counts")


class _Routed(NamedTuple):
    """Tokens, matrices, gradients and the order of the routed rows."""

    x: jax.Array
    rows_of_x: jax.Array
    w: jax.Array
    dy: jax.Array
    order: Order


def tables(settings: MoeSettings) -> Iterator[tuple[str, list[Case]]]:
    """A table for each part, of each shape that it is measured at."""
    make = {"products": _products, "formats": _formats, "block": _blocks}
    for part in settings.parts:
        for shape in SHAPES[part]:
            yield f"Mixtures: {part} · {settings.dtype}", list(make[part](settings, shape))


def random_order(shape: Shape, key: jax.Array) -> Order:
    """The order of a random routing.

    Args:
        shape: tokens and experts.
        key: random state.
    """
    logits = jax.random.normal(key, (shape.tokens, shape.experts))
    return sort_by_expert(jax.lax.top_k(logits, shape.experts_per_token)[1], shape.experts)


def _routed(settings: MoeSettings, shape: Shape) -> _Routed:
    keys = jax.random.split(jax.random.key(0), 4)

    @jax.jit
    def draw():
        x = jax.random.normal(keys[0], (shape.tokens, shape.into), settings.dtype)
        w = jax.random.normal(keys[1], (shape.experts, shape.out, shape.into), settings.dtype) * 0.02
        dy = jax.random.normal(keys[2], (shape.rows, shape.out), settings.dtype)
        order = random_order(shape, keys[3])
        return _Routed(x, x[order.rows], w.astype(settings.dtype), dy, order)

    return draw()


def _products(settings: MoeSettings, shape: Shape) -> Iterator[Case]:
    x, sorted_x, w, dy, order = _routed(settings, shape)
    sizes, rows = order.group_sizes, order.rows
    passes: dict[str, tuple[Any, Callable[..., Any], tuple[Any, ...]]] = {
        "forward": (MATMUL, grouped_matmul, (sorted_x, w, sizes)),
        "forward, gathered": (MATMUL, _gathered(grouped_matmul), (x, w, sizes, rows)),
        "gradient in x": (DX, grouped_matmul_dx, (dy, w, sizes)),
        "gradient in w": (DW, grouped_matmul_dw, (dy, sorted_x, sizes)),
        "gradient in w, gathered": (DW, _gathered(grouped_matmul_dw), (dy, x, sizes, rows)),
    }
    for name, (registry, function, arguments) in passes.items():
        for implementation in registry.implementations:
            if implementation != "xla":  # a product of all rows with every expert's matrix
                forced = functools.partial(function, implementation=implementation)
                yield Case(_labels(shape, name, implementation), forced, arguments, flops=shape.flops)
    even = sorted_x[: shape.rows // shape.experts * shape.experts].reshape(shape.experts, -1, shape.into)
    product = functools.partial(jnp.einsum, "xmk,xnk->xmn")
    yield Case(_labels(shape, "even groups", "vendor"), product, (even, w), flops=shape.flops)
    for name, timed in torch_peers.grouped_products(shape, settings.dtype, jax.device_get(sizes)).items():
        yield Case(_labels(shape, name, "torch"), timed, flops=shape.flops)


def _labels(shape: Shape, operation: str, implementation: str) -> dict[str, Any]:
    return {"shape": shape, "operation": operation, "implementation": implementation}


def _gathered(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda first, second, sizes, rows, **options: function(first, second, sizes, rows=rows, **options)


def _formats(settings: MoeSettings, shape: Shape) -> Iterator[Case]:
    """The product with experts in 16 and in 4 bits, as models compute it."""
    x, _, w, _, order = _routed(settings, shape)
    size = shape.out, shape.into
    packed = jax.jit(jax.vmap(functools.partial(NF4Weight.quantize, nested=False)))(w)
    scales = jnp.full((shape.experts, shape.out, shape.into // 32), 127, jnp.uint8)
    micro = MXFP4Weight(packed.codes, scales, shape=size, dtype=settings.dtype)
    arguments = x, order.group_sizes, order.rows
    yield Case(_labels(shape, "16 bits", ""), _gathered(grouped_matmul), (x, w, *arguments[1:]), flops=shape.flops)

    def product(weight, x, sizes, rows):
        return weight.grouped_matmul(x, sizes, rows=rows)

    for name, weight in (("NF4", packed), ("MXFP4", micro)):
        yield Case(_labels(shape, name, ""), product, (weight, *arguments), flops=shape.flops)


def _blocks(settings: MoeSettings, shape: Shape) -> Iterator[Case]:
    features, width = shape.out // 2, shape.into
    keys = iter(jax.random.split(jax.random.key(0), 12))

    def draw(*sizes: int, dtype: str = settings.dtype) -> jax.Array:
        return (0.02 * jax.random.normal(next(keys), sizes)).astype(dtype)

    x, dout = 50 * draw(shape.tokens, width), 50 * draw(shape.tokens, width)
    router = draw(shape.experts, width, dtype="float32")
    gate_up, down = draw(shape.experts, shape.out, width), draw(shape.experts, width, features)
    routing = RouterSettings(shape.experts_per_token, normalize=True)

    def pass_of(block: Block):
        def forward(matrices, frozen, x):
            router, gate_up, down = frozen
            chosen = route(jnp.matmul(x.astype(jnp.float32), router.T), routing)
            arrays = Operands(gate_up, None, down, None, matrices)
            return routed_experts(block, x, chosen.weights, chosen.experts, arrays)

        return forward_and_backward(forward)

    flops = 3 * shape.flops  # gate and up, and half as much for down; forward and backward in x
    for rank in settings.ranks:
        parts = PartSpec("gate_up_proj", shape.out, rank, 2.0), PartSpec("down_proj", width, rank, 2.0)
        matrices = {
            part.name: (
                draw(shape.experts, rank, into, dtype="float32"),
                draw(shape.experts, part.rows, rank, dtype="float32"),
            )
            for part, into in zip(parts, (width, features), strict=True)
            if rank
        }
        block = Block(shape.experts, "silu", None, *parts)
        arguments = (matrices, (router, gate_up, down), x, dout)
        yield Case(_labels(shape, "block", f"r={rank}" if rank else "frozen"), pass_of(block), arguments, flops=flops)


BENCH = Bench(
    "Time products over groups of rows and their gradients, experts in 4 bits, and a Qwen3-MoE block forward and "
    "backward, with tokens routed at random. The defaults suit a GPU.",
    MoeSettings,
    tables,
    {"shape": "shape", "": "operation", "by": "implementation"},
    {"TFLOP/s": ("teraflops_per_second", ",.0f")},
)
