"""Cost of adapters in a gated block, forward and backward, over the block with frozen weights alone.

Each weight format has three cases: the frozen block (its gradient to the input is computed), the block with adapters
as plain sums beside each projection, which JAX differentiates, and the models' unit, at every rank. A pass goes over
more than a gigabyte, so caches are cold. TFLOP/s count the large products alone; the cost is that of the adapters.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fastjax.bench.tables import Bench, Beside, Case, number, word
from fastjax.lora.params import LoraLinear, LoraParam
from fastjax.models.mlp import MLP
from fastjax.models.projection import Projection
from fastjax.quantization import NF4Weight, matmul
from fastjax.quantization.weights import linear
from pallas_kernels.glu import glu


@dataclasses.dataclass(frozen=True)
class LoraCase:
    """Settings of the measurement.

    Attributes:
        tokens: rows and tokens a row.
        shape: width of the block, and its features.
        weights: formats of the frozen weights: "nf4", or a dtype.
        ranks: of the adapters, on all three projections.
        activation: Hugging Face's name.
        dtype: of the activations.
        rounds: runs; their median counts.
    """

    tokens: tuple[int, int] = (4, 2048)
    shape: tuple[int, int] = (4096, 14336)
    weights: tuple[str, ...] = ("nf4", "bfloat16")
    ranks: tuple[int, ...] = (16, 64)
    activation: str = "silu"
    dtype: str = "bfloat16"
    rounds: int = 9


def tables(case: LoraCase) -> Iterator[tuple[str, list[Case]]]:
    """The one table.

    Args:
        case: the settings.
    """
    (rows, length), (width, features) = case.tokens, case.shape
    flops = 2 * 6 * rows * length * width * features  # three matrices, forward and to the input
    first, second, *keys = jax.random.split(jax.random.key(0), 3 + len(case.weights))
    x, dy = jax.random.normal(first, (2, *case.tokens, width), case.dtype)
    cases = []
    for weight, key in zip(case.weights, keys, strict=False):
        upper, lower = jax.random.split(key)
        weights = (random_weight(weight, (2 * features, width), upper), random_weight(weight, (width, features), lower))
        for kind, rank in [("frozen", 0), *((kind, rank) for rank in case.ranks for kind in ("plain", "unit"))]:
            graphdef, trained, frozen = build(case, weights, rank, second)
            apply = plain if kind == "plain" else lambda block, x: block(x, None)
            function = forward_and_backward(
                lambda trained, frozen, x, graphdef=graphdef, apply=apply: apply(
                    nnx.merge(graphdef, trained, frozen), x
                )
            )
            labels = {"weight": weight, "adapters": kind, "rank": rank}
            cases.append(Case(labels, function, (trained, frozen, x, dy), flops=flops))
    yield f"gated block · {rows}×{length} tokens · {width}×{features}", cases


BENCH = Bench(
    LoraCase,
    tables,
    {"weights": word("weight"), "adapters": word("adapters"), "rank": lambda row: str(row["rank"] or "")},
    {"cost": number("cost", "+.1%"), "TFLOP/s": number("teraflops_per_second", ".0f")},
    beside={
        "cost": Beside(
            lambda row: None if row["adapters"] == "frozen" else {"weight": row["weight"], "adapters": "frozen"},
            lambda row, frozen: row["milliseconds"] / frozen["milliseconds"] - 1,
        )
    },
)


def forward_and_backward(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Of (trained, frozen, x, dy): the output, the gradients of the trained arrays, and that of x.

    Args:
        apply: the block, of (trained, frozen, x).
    """

    def both(trained, frozen, x, dy):
        y, pullback = jax.vjp(lambda trained, x: apply(trained, frozen, x), trained, x)
        return y, pullback(dy)

    return both


def build(case: LoraCase, weights: tuple[Any, Any], rank: int, key: jax.Array) -> tuple[Any, Any, Any]:
    """The block with adapters of a rank: its graph, its trained and its frozen arrays.

    Args:
        case: the sizes.
        weights: of gate and up together, and of down.
        rank: 0: no adapters.
        key: random state of the adapters.
    """
    width, features = case.shape

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
    graphdef, trained, frozen = nnx.split(MLP(case.activation, gate_up, down), LoraParam, ...)
    return graphdef, nnx.to_pure_dict(trained), nnx.to_pure_dict(frozen)


def plain(block: MLP, x: jax.Array) -> jax.Array:
    """The block with its adapters as sums beside its projections, in the dtype of x."""

    def projected(projection: Projection, x: jax.Array) -> list[jax.Array]:
        whole, outputs, start = matmul(x, projection.weight.get_value()), [], 0
        for name, rows in projection.parts:
            adapter = projection.adapters[name]
            thin = linear(x, adapter.lora_A[...])
            outputs.append(whole[..., start : start + rows] + linear(thin, adapter.lora_B[...] * adapter.scaling))
            start += rows
        return outputs

    gate, up = projected(block.gate_up, x)
    return projected(block.down, glu(gate, up, activation=block.activation))[0]


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
