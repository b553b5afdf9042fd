"""The gated delta rule by every implementation, forward and with its gradients, beside flash-linear-attention's."""

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fastjax.bench import torch_peers
from fastjax.bench.options import DTYPES, option
from fastjax.bench.tables import Bench
from fastjax.bench.timing import Case, Row
from fastjax.errors import ConfigError
from pallas_kernels.gated_delta import REGISTRY, gated_delta

DIRECTIONS = ("forward", "both")
PEER = "flash-linear-attention"


@dataclasses.dataclass(frozen=True)
class GatedDeltaSettings:
    """Settings of the measurement."""

    tokens: tuple[int, int] = option((1, 8192), "rows, and tokens a row", nargs=2)
    documents: tuple[int, ...] = option((1, 8), "equal documents of a row; a table for each")
    heads: tuple[int, int] = option((16, 32), "heads of queries and keys, and of values", nargs=2)
    size: int = option(128, "of a head")
    dtype: str = option("bfloat16", "of queries, keys and values", choices=DTYPES)
    rounds: int = option(9, "runs of which the median counts")


def tables(settings: GatedDeltaSettings) -> Iterator[tuple[str, list[Case]]]:
    """A table for each number of documents.

    Raises:
        ConfigError: documents that do not divide a row, or heads of values that are no multiple of the others.
    """
    (rows, length), (key_heads, heads), size = settings.tokens, settings.heads, settings.size
    if heads % key_heads:
        raise ConfigError(f"--heads: expected a multiple of the {key_heads} key heads, got {heads}")
    if wrong := [count for count in settings.documents if count < 1 or length % count]:
        raise ConfigError(f"--documents: expected divisors of the {length} tokens of a row, got {wrong[0]}")
    arrays = make_arrays(settings)
    facts = {"dtype": arrays["v"].dtype, "sizes": (size, size), "states": 0}
    names = [name for name, reason in REGISTRY.reasons(**facts).items() if reason is None]
    for count in settings.documents:
        ids = jnp.broadcast_to(
            jnp.repeat(jnp.arange(1, count + 1, dtype=jnp.int32), length // count)[None], (rows, length)
        )
        given = arrays | ({"ids": ids} if count > 1 else {})
        labels = [{"documents": count, "direction": one} for one in DIRECTIONS]
        cases = [
            Case(one | {"implementation": name}, partial(_CALLS[one["direction"]], name), (given,))
            for one in labels
            for name in names
        ]
        shape = (rows, length, key_heads, heads, size)
        for one in labels:
            peers = torch_peers.gated_delta(shape, settings.dtype, count, gradients=one["direction"] == "both")
            cases += [Case(one | {"implementation": name}, timed) for name, timed in peers.items()]
        yield f"gated delta · {rows}×{length}, documents {count} · {key_heads}, {heads} heads of {size}", cases


def make_arrays(settings: GatedDeltaSettings) -> dict[str, Array]:
    """Random operands and a cotangent of the output; queries and keys have length one, gates a wide spread."""
    (rows, length), (key_heads, heads), size = settings.tokens, settings.heads, settings.size
    draw = [jax.random.normal(key, (rows, length, heads, size)) for key in jax.random.split(jax.random.key(0), 5)]
    q, k = (array[:, :, :key_heads] for array in draw[:2])
    return {
        "q": (q / jnp.linalg.norm(q, axis=-1, keepdims=True)).astype(settings.dtype),
        "k": (k / jnp.linalg.norm(k, axis=-1, keepdims=True)).astype(settings.dtype),
        "v": draw[2].astype(settings.dtype),
        "decay": -jnp.exp(2 * draw[3][..., 0] - 2),
        "beta": jax.nn.sigmoid(draw[3][..., 1]),
        "dout": draw[4].astype(settings.dtype),
    }


def forward(implementation: str, arrays: dict[str, Array]) -> Array:
    """The output by an implementation."""
    operands = (arrays[name] for name in ("q", "k", "v", "decay", "beta"))
    options: dict[str, Any] = {"segment_ids": arrays.get("ids"), "implementation": implementation}
    return gated_delta(*operands, scale=arrays["q"].shape[-1] ** -0.5, **options)[0]


def both(implementation: str, arrays: dict[str, Array]) -> tuple[Array, ...]:
    """The output and the gradients of the operands, for the cotangent among the arrays."""

    def of(*operands):
        given = zip(("q", "k", "v", "decay", "beta"), operands, strict=True)
        return forward(implementation, arrays | dict(given))

    out, vjp = jax.vjp(of, *(arrays[name] for name in ("q", "k", "v", "decay", "beta")))
    return out, *vjp(arrays["dout"])


_CALLS = {"forward": forward, "both": both}


def _peer(row: Row) -> dict[str, Any]:
    return {name: row[name] for name in ("documents", "direction")} | {"implementation": PEER}


BENCH = Bench(
    "Time the gated delta rule, forward and with its gradients, by every implementation that this device has, beside "
    "flash-linear-attention's where it is installed. The defaults suit a GPU.",
    GatedDeltaSettings,
    tables,
    {"": "direction", "by": "implementation"},
    {"of FLA": ("of_fla", ".2f"), "temporary bytes": ("temporary_bytes", ",d")},
    {"of_fla": (_peer, lambda row, peer: row["microseconds"] / peer["microseconds"])},
)
