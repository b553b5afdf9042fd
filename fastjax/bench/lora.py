"""Cost of adapters in a gated block, forward and backward, over the block with frozen weights alone.

For each weight format there is the frozen block (its gradient to the input is computed), and the models' unit with
adapters of every rank. A pass goes over more than a gigabyte, so caches are cold. TFLOP/s count the large products
alone; the cost is that of the adapters.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fastjax.bench.options import DTYPES, option
from fastjax.bench.tables import Bench
from fastjax.bench.timing import Case
from fastjax.lora.params import LoraLinear, LoraParam
from fastjax.models.mlp import MLP
from fastjax.models.projection import Projection
from fastjax.quantization import NF4Weight


@dataclasses.dataclass(frozen=True)
class LoraSettings:
    """Settings of the measurement."""

    tokens: tuple[int, int] = option((4, 2048), "rows, and tokens a row", nargs=2)
    shape: tuple[int, int] = option((4096, 14336), "width of the block, and its features", nargs=2)
    weights: tuple[str, ...] = option(("nf4", "bfloat16"), "formats of the frozen weights", choices=("nf4", *DTYPES))
    ranks: tuple[int, ...] = option((16, 64), "of the adapters, on all three projections")
    dtype: str = option("bfloat16", "of the activations", choices=DTYPES)
    rounds: int = option(9, "runs of which the median counts")


def tables(settings: LoraSettings) -> Iterator[tuple[str, list[Case]]]:
    """The one table."""
    (rows, length), (width, features) = settings.tokens, settings.shape
    flops = 2 * 6 * rows * length * width * features  # three matrices, forward and to the input
    first, second, *keys = jax.random.split(jax.random.key(0), 3 + len(settings.weights))
    x, dy = jax.random.normal(first, (2, *settings.tokens, width), settings.dtype)
    cases = []
    for weight, key in zip(settings.weights, keys, strict=False):
        upper, lower = jax.random.split(key)
        weights = (random_weight(weight, (2 * features, width), upper), random_weight(weight, (width, features), lower))
        for rank in (0, *settings.ranks):
            graphdef, trained, frozen = build(settings.shape, weights, rank, second)
            function = forward_and_backward(
                lambda trained, frozen, x, graphdef=graphdef: nnx.merge(graphdef, trained, frozen)(x, None)
            )
            labels = {"weight": weight, "rank": rank or None}
            cases.append(Case(labels, function, (trained, frozen, x, dy), flops=flops))
    yield f"gated block · {rows}×{length} tokens · {width}×{features}", cases


BENCH = Bench(
    "Time a gated block forward and backward: frozen, and with adapters. The defaults suit a GPU.",
    LoraSettings,
    tables,
    {"weights": "weight", "rank": "rank"},
    {"cost": ("cost", "+.1%"), "TFLOP/s": ("teraflops_per_second", ".0f")},
    beside={
        "cost": (
            lambda row: {"weight": row["weight"], "rank": None} if row["rank"] else None,
            lambda row, frozen: row["microseconds"] / frozen["microseconds"] - 1,
        )
    },
)


def forward_and_backward(apply: Callable[..., Any]) -> Callable[..., Any]:
    """A function of (trained, frozen, x, dy) → the output, the gradients of the trained arrays, and that of x.

    Args:
        apply: the block, of (trained, frozen, x).
    """

    def both(trained, frozen, x, dy):
        y, pullback = jax.vjp(lambda trained, x: apply(trained, frozen, x), trained, x)
        return y, pullback(dy)

    return both


def build(shape: tuple[int, int], weights: tuple[Any, Any], rank: int, key: jax.Array) -> tuple[Any, Any, Any]:
    """The block with adapters of a rank: its graph, its trained and its frozen arrays.

    Args:
        shape: width of the block, and its features.
        weights: of gate and up together, and of down.
        rank: 0: no adapters.
        key: random state of the adapters.
    """
    width, features = shape

    def projection(sizes, weight, columns: int, key) -> Projection:
        adapters = {}
        for (name, rows), own in zip(sizes, jax.random.split(key, len(sizes)), strict=True):
            first, second = jax.random.split(own)
            a = jax.random.normal(first, (rank, columns), jnp.float32) * columns**-0.5
            b = jax.random.normal(second, (rows, rank), jnp.float32) * 0.01
            adapters[name] = LoraLinear(a, b, None, scaling=2.0, dropout=0.0)
        return Projection(sizes, weight, None, adapters if rank else {})

    inner, outer = jax.random.split(key)
    gate_up = projection([("gate_proj", features), ("up_proj", features)], weights[0], width, inner)
    down = projection([("down_proj", width)], weights[1], features, outer)
    graphdef, trained, frozen = nnx.split(MLP("silu", gate_up, down), LoraParam, ...)
    return graphdef, nnx.to_pure_dict(trained), nnx.to_pure_dict(frozen)


def random_weight(kind: str, shape: tuple[int, int], key: jax.Array) -> Any:
    """A random frozen weight.

    Args:
        kind: "nf4" or a dtype.
        shape: (out, in).
        key: random state.
    """

    @jax.jit
    def draw(key):
        matrix = jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(shape[1] ** -0.5)
        return NF4Weight.quantize(matrix) if kind == "nf4" else matrix.astype(kind)

    return draw(key)
