"""The head and its loss, forward and backward to the input, beside the two matrix products alone.

Of a frozen head: the products over chunks of tokens without any loss between them are the floor; then the whole
operation by every implementation that the device has and by size of the chunks, with the temporaries that the compiler
plans.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fastjax.bench.options import DTYPES, option
from fastjax.bench.tables import Bench
from fastjax.bench.timing import Case
from fastjax.errors import ConfigError
from pallas_kernels.cross_entropy import chunked_cross_entropy
from pallas_kernels.cross_entropy.chunks import REGISTRY


@dataclasses.dataclass(frozen=True)
class LossSettings:
    """Settings of the measurement."""

    tokens: tuple[int, int] = option((4, 2048), "rows, and tokens a row", nargs=2)
    shape: tuple[int, int] = option((4096, 128_256), "width of the model, and words", nargs=2)
    chunks: tuple[int, ...] = option((512, 1024, 2048), "tokens whose logits exist at once")
    dtype: str = option("bfloat16", "of activations, head and logits", choices=DTYPES)
    rounds: int = option(9, "runs of which the median counts")


def tables(settings: LossSettings) -> Iterator[tuple[str, list[Case]]]:
    """The one table.

    Raises:
        ConfigError: chunks that do not divide the tokens.
    """
    (batch, length), (width, vocab) = settings.tokens, settings.shape
    for chunk in settings.chunks:
        if chunk % batch or length % (chunk // batch):
            raise ConfigError(f"--chunks: expected parts of {batch}×{length} tokens, all rows in each, got {chunk}")
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (batch, length, width), settings.dtype)
    weight = jax.random.normal(keys[1], (vocab, width), settings.dtype) * jnp.asarray(width**-0.5, settings.dtype)
    targets = jax.random.randint(keys[2], (batch, length), 0, vocab, jnp.int32)
    reasons = REGISTRY.reasons(shape=(batch, 1, vocab), dtype=settings.dtype)
    names = [name for name, reason in reasons.items() if reason is None]
    cases = []
    for chunk in settings.chunks:
        size = chunk // batch
        labels = {"part": "products", "implementation": None, "chunk": chunk}
        cases.append(Case(labels, products(size), (hidden, weight)))
        for name in names:
            labels = {"part": "loss", "implementation": name, "chunk": chunk}
            cases.append(Case(labels, loss(size, name), (hidden, weight, targets)))
    yield f"head and loss · {batch}×{length} tokens · {width}×{vocab} · {settings.dtype}", cases


BENCH = Bench(
    "Time a frozen head with its loss, forward and backward to the input, by implementation and size of the chunks, "
    "beside the two matrix products alone. The defaults suit a GPU.",
    LossSettings,
    tables,
    {"part": "part", "by": "implementation", "chunk": "chunk"},
    {
        "over products": ("over_products", "+,.0f"),
        "temporary bytes": ("temporary_bytes", ",d"),
    },
    beside={
        "over_products": (
            lambda row: None if row["part"] == "products" else {"part": "products", "chunk": row["chunk"]},
            lambda row, products: row["microseconds"] - products["microseconds"],
        )
    },
)


def loss(chunk_size: int, implementation: str) -> Callable[..., Any]:
    """A function of (hidden, weight, targets) → the sums, and the gradient of hidden.

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
    """A function of (hidden, weight) → hidden · weightᵀ · weight, chunk by chunk.

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
