"""Attention problems: a table of those whose speed is measured, their arrays, and their unmasked work."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Int32

from fastjax.data.packing import best_fit
from fastjax.errors import ConfigError
from pallas_kernels.attention import segment_ranges

NAMES = ("short", "long", "documents", "packed", "window", "cap", "sinks", "d64", "d256")


@dataclasses.dataclass(frozen=True)
class Problem:
    """A call.

    Attributes:
        name: of the table that it is in.
        batch: B.
        length: S.
        heads: H.
        kv_heads: K.
        size: D.
        window: sliding window; None: none.
        cap: soft cap of the logits; None: none.
        sinks: whether each head has one.
        documents: the lengths of each row's documents, the rest of the row being padding; None: a row is one document.
        dense: the problem that is the same without its mask; None: nothing is masked beyond causality.
        keys: T; None: S.
        value_size: Dv; None: D.
        causal: whether a query sees no key behind it.
        offset: place of the first query among the keys; None: as the call without one.
    """

    name: str
    batch: int
    length: int
    heads: int
    kv_heads: int
    size: int = 128
    window: int | None = None
    cap: float | None = None
    sinks: bool = False
    documents: tuple[tuple[int, ...], ...] | None = None
    dense: str | None = None
    keys: int | None = None
    value_size: int | None = None
    causal: bool = True
    offset: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `attention` and its reference."""
        return {
            "causal": self.causal,
            "sliding_window": self.window,
            "logits_soft_cap": self.cap,
            "query_offset": self.offset,
        }

    def __str__(self) -> str:
        """The problem as titles and labels name it."""
        extra = {
            f"window {self.window}": self.window is not None,
            f"cap {self.cap:g}" if self.cap else "": self.cap is not None,
            "sinks": self.sinks,
            f"D={self.size}": self.size != 128,
        }
        if self.documents is not None:
            extra[f"{sum(map(len, self.documents)) / self.batch:.0f} documents a row"] = True
        return " ".join([f"{self.batch}×{self.length}", *(word for word, said in extra.items() if said)])

    def pairs(self) -> int:
        """Pairs of a query and a key that it sees, in all rows."""
        rows = ((self.length,),) * self.batch if self.documents is None else self.documents
        return sum(_seen(length, self.window) for row in rows for length in row)

    def operations(self, direction: str) -> int:
        """Floating-point operations of the unmasked products: two forward, five more backward.

        Args:
            direction: "forward" or "both".
        """
        return (4 if direction == "forward" else 14) * self.heads * self.size * self.pairs()


def check_names(argument: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Raise ConfigError on an unknown name.

    Args:
        argument: the flag, for the message.
        names: the names.
        known: the valid ones.

    Raises:
        ConfigError: one is not among them.
    """
    for name in names:
        if name not in known:
            raise ConfigError(f"bench attention: {argument}: expected some of {', '.join(known)}, got {name}")


def make_problems(
    names: Sequence[str],
    batch: int = 4,
    length: int = 4096,
    heads: int = 32,
    kv_heads: int = 8,
    lengths: Sequence[int] | None = None,
) -> list[Problem]:
    """The problems of the table.

    Args:
        names: of `NAMES`.
        batch: rows.
        length: of the short rows; long rows have twice as many tokens, a window an eighth of these.
        heads: query heads; those of size 256 are half as many.
        kv_heads: key heads.
        lengths: of documents, to be packed into the long rows; None: `chat_lengths`.

    Raises:
        ConfigError: heads or lengths that do not fit.
    """
    if heads % (2 * kv_heads) or length % 16:
        raise ConfigError(
            "bench attention: expected heads divisible by twice kv_heads, and seq by 16, got "
            f"{heads}, {kv_heads} and {length}"
        )
    long = 2 * length
    rows = packed(chat_lengths(batch * long, long) if lengths is None else lengths, batch, long)
    short_row: dict[str, Any] = {"batch": batch, "length": length, "heads": heads, "kv_heads": kv_heads}
    long_row = short_row | {"length": long}
    table = {
        "short": short_row,
        "long": long_row,
        "documents": short_row | {"documents": ((length // 8,) * 8,) * batch, "dense": "short"},
        "packed": long_row | {"documents": rows, "dense": "long"},
        "window": long_row | {"window": long // 8, "dense": "long"},
        "cap": long_row | {"cap": 50.0},
        "sinks": long_row | {"sinks": True},
        "d64": short_row | {"size": 64},
        "d256": short_row | {"size": 256, "heads": heads // 2},
    }
    return [Problem(name, **table[name]) for name in names]


def chat_lengths(tokens: int, most: int, seed: int = 0) -> list[int]:
    """Lengths of chats: log-normal, half of them under 365 tokens, their mean 600.

    That is a round figure for public chat sets, most of which lie within a factor of two of it, and of no one set.

    Args:
        tokens: about how many in all, four times over, so that rows can be chosen.
        most: longer ones are cut.
        seed: of the random numbers.
    """
    rng = np.random.default_rng(seed)
    count = max(16, 4 * tokens // 600)
    return np.clip(np.exp(rng.normal(5.9, 1.0, count)).astype(int), 8, most).tolist()


def read_lengths(path: Path) -> list[int]:
    """Lengths of documents from a file: .npy, or a number a line.

    Raises:
        ConfigError: it is no such file.
        OSError: it cannot be read.
    """
    try:
        values = np.load(path) if path.suffix == ".npy" else np.loadtxt(path, ndmin=1)
    except ValueError as error:
        raise ConfigError(f"--lengths {path}: expected .npy or a number a line, got another file ({error})") from None
    values = values.reshape(-1)
    if not values.size or not np.all((values >= 1) & (values == np.floor(values))):
        raise ConfigError(f"--lengths {path}: expected whole numbers of at least 1, got {values[:8]}")
    return values.astype(int).tolist()


def packed(lengths: Sequence[int], batch: int, row: int, seed: int = 0) -> tuple[tuple[int, ...], ...]:
    """Rows of documents, packed as training packs them, and some of the rows by chance.

    Args:
        lengths: of the documents; longer ones than a row are cut.
        batch: rows.
        row: tokens of a row.
        seed: of the random choice.

    Raises:
        ConfigError: there are fewer rows.
    """
    cut = np.minimum(lengths, row)
    bins = best_fit(cut, row)
    if len(bins) < batch:
        raise ConfigError(f"--lengths: expected documents for {batch} rows of {row} tokens, got {cut.sum()} tokens")
    if len(bins) > batch:  # the last documents leave a row that is not full, one of thousands in a whole data set
        bins.remove(min(bins, key=lambda members: cut[members].sum()))
    chosen = np.random.default_rng(seed).choice(len(bins), batch, replace=False)
    return tuple(tuple(int(cut[item]) for item in bins[index]) for index in chosen)


def segment_ids(documents: Sequence[Sequence[int]], length: int) -> Int32[np.ndarray, "B S"]:
    """The document of each token, from 1; 0 is padding.

    Args:
        documents: the lengths of each row's documents.
        length: S.
    """
    ids = np.zeros((len(documents), length), np.int32)
    for row, lengths in zip(ids, documents, strict=True):
        row[: sum(lengths)] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return ids


def make_arrays(problem: Problem, dtype: DTypeLike, count: int = 1) -> list[dict[str, Any]]:
    """Random q, k, v and a cotangent of the output, `count` times; arrays of documents and sinks, the same each time.

    Args:
        problem: of a table.
        dtype: of the arrays.
        count: how many.
    """
    shared: dict[str, Any] = {}
    if problem.documents is not None:
        shared["ids"] = jnp.asarray(segment_ids(problem.documents, problem.length))
        most = max(map(len, problem.documents))
        shared["ranges"] = jax.jit(partial(segment_ranges, max_documents=most))(shared["ids"])
    if problem.sinks:
        shared["sinks"] = jax.random.normal(jax.random.key(1), (problem.heads,))
    value_size, keys = problem.value_size or problem.size, problem.keys or problem.length
    shapes = {
        "q": (problem.batch, problem.length, problem.heads, problem.size),
        "k": (problem.batch, keys, problem.kv_heads, problem.size),
        "v": (problem.batch, keys, problem.kv_heads, value_size),
        "dout": (problem.batch, problem.length, problem.heads, value_size),
    }

    @jax.jit
    def draw(key):
        drawn = zip(jax.random.split(key, 4), shapes.items(), strict=True)
        return {name: jax.random.normal(own, shape, dtype) for own, (name, shape) in drawn}

    return [draw(key) | shared for key in jax.random.split(jax.random.key(0), count)]


def _seen(length: int, window: int | None) -> int:
    """Pairs within a document."""
    full = length if window is None else min(length, window)
    return full * (full + 1) // 2 + (length - full) * full
