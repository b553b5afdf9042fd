"""Speed of attention: every case by every implementation, forward and forward with backward.

Each goes over as many sets of inputs as exceed the second-level cache several times, so that it finds none of them
there. TFLOP/s count unmasked work. The share is the time over the unmasked part of the implementation's own time for
the same rows without the mask; 1 would be a kernel that loses nothing.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from fastjax.bench.documents import Documents, chat_lengths, packed, read_lengths, segment_ids
from fastjax.bench.options import DTYPES, option
from fastjax.bench.tables import Bench
from fastjax.bench.timing import Case, Row
from fastjax.errors import ConfigError
from pallas_kernels.attention import attention, segment_ranges

CASES = ("short", "long", "documents", "packed", "window", "cap", "sinks", "d64", "d256")
#: Floating-point operations of a pair of a query and a key, for each head and each of its dimensions: two products
#: forward, five more backward.
DIRECTIONS = {"forward": 4, "both": 14}
IMPLEMENTATIONS = ("mosaic", "cudnn", "triton", "xla")


@dataclasses.dataclass(frozen=True)
class AttentionSettings:
    """Settings of the measurement."""

    cases: tuple[str, ...] = option(
        CASES,
        "short and long: causal rows of --seq and of twice as many tokens; documents: 8 equal ones in a short row; "
        "packed: documents of many lengths in long rows; window: an eighth of a long row; cap, sinks: long rows; d64, "
        "d256: short rows of heads of that size",
        choices=CASES,
    )
    implementations: tuple[str, ...] = option(
        (), "of attention; nothing: xla on a CPU, the others on a GPU", choices=IMPLEMENTATIONS
    )
    batch: int = option(4, "rows")
    seq: int = option(4096, "tokens of a short row")
    heads: int = option(32, "query heads, half as many at D=256")
    kv_heads: int = option(8, "key heads")
    dtype: str = option("bfloat16", "of the arrays", choices=DTYPES)
    lengths: Path | None = option(
        None, "of documents to pack: .npy, or a number a line; nothing: as chats have them", type=Path, metavar="FILE"
    )
    cold_bytes: int = option(256 * 2**20, "inputs that a program goes over")
    rounds: int = option(9, "runs of which the median counts")


@dataclasses.dataclass(frozen=True)
class Problem:
    """A causal call.

    Attributes:
        name: of the table that it is in.
        batch: B.
        length: S and T.
        heads: H.
        kv_heads: K.
        size: D.
        window: sliding window; None: none.
        cap: soft cap of the logits; None: none.
        sinks: whether each head has one.
        documents: of each row; None: a row is one document.
        dense: the problem that is the same without its mask; None: nothing is masked beyond causality.
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
    documents: Documents | None = None
    dense: str | None = None

    def pairs(self) -> int:
        """Pairs of a query and a key that it sees, in all rows."""
        rows = ((self.length,),) * self.batch if self.documents is None else self.documents
        return sum(_seen(length, self.window) for row in rows for length in row)


def make_arrays(problem: Problem, dtype: DTypeLike, count: int = 1) -> list[dict[str, Any]]:
    """Random q, k, v and a cotangent of the output, `count` times; arrays of documents and sinks, the same each time.

    Args:
        problem: the call.
        dtype: of the arrays.
        count: how many.
    """
    shared: dict[str, Any] = {}
    if problem.documents is not None:
        shared["ids"] = jnp.asarray(segment_ids(problem.documents, problem.length))
        shared["ranges"] = jax.jit(segment_ranges)(shared["ids"])
    if problem.sinks:
        shared["sinks"] = jax.random.normal(jax.random.key(1), (problem.heads,))
    heads = {"q": problem.heads, "k": problem.kv_heads, "v": problem.kv_heads, "dout": problem.heads}

    @jax.jit
    def draw(key):
        keys = zip(jax.random.split(key, 4), heads.items(), strict=True)
        rows = problem.batch, problem.length
        return {name: jax.random.normal(own, (*rows, number, problem.size), dtype) for own, (name, number) in keys}

    return [draw(key) | shared for key in jax.random.split(jax.random.key(0), count)]


def _seen(length: int, window: int | None) -> int:
    """Pairs within a document."""
    full = length if window is None else min(length, window)
    return full * (full + 1) // 2 + (length - full) * full


def make_problems(settings: AttentionSettings) -> list[Problem]:
    """The calls that are measured.

    Raises:
        ConfigError: heads or lengths that do not fit.
        OSError: the file of lengths cannot be read.
    """
    batch, length, heads, kv_heads = settings.batch, settings.seq, settings.heads, settings.kv_heads
    if heads % (2 * kv_heads) or length % 16:
        raise ConfigError(
            "bench attention: expected heads divisible by twice kv_heads, and seq by 16, got "
            f"{heads}, {kv_heads} and {length}"
        )
    long = 2 * length
    rows = None
    if "packed" in settings.cases:
        lengths = chat_lengths(batch * long, long) if settings.lengths is None else read_lengths(settings.lengths)
        rows = packed(lengths, batch, long)
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
    return [Problem(name, **table[name]) for name in settings.cases]


def attend(implementation: str, problem: Problem, arrays: dict[str, Any]) -> Array:
    """The output of a problem's arrays by an implementation."""
    return attention(
        arrays["q"],
        arrays["k"],
        arrays["v"],
        segment_ranges=arrays.get("ranges"),
        sinks=arrays.get("sinks"),
        causal=True,
        sliding_window=problem.window,
        logits_soft_cap=problem.cap,
        implementation=implementation,
    )


def both(implementation: str, problem: Problem, arrays: dict[str, Any]) -> tuple[Array, ...]:
    """The output and the gradients of q, k and v, for the cotangent among the arrays."""

    def of(q, k, v):
        return attend(implementation, problem, arrays | {"q": q, "k": k, "v": v})

    out, vjp = jax.vjp(of, arrays["q"], arrays["k"], arrays["v"])
    return out, *vjp(arrays["dout"])


def tables(settings: AttentionSettings) -> Iterator[tuple[str, list[Case]]]:
    """A table for each case: both directions by every implementation."""
    on_gpu = jax.default_backend() == "gpu"  # where XLA's would take most of the time
    names = settings.implementations or [name for name in IMPLEMENTATIONS if (name == "xla") != on_gpu]
    for problem in make_problems(settings):
        numbers = 2 * problem.batch * problem.length * (problem.heads + problem.kv_heads) * problem.size
        # so many sets of inputs that together they exceed any cache
        count = max(1, -(-settings.cold_bytes // (numbers * jnp.dtype(settings.dtype).itemsize)))
        sets = tuple(make_arrays(problem, settings.dtype, count))
        cases = [_case(problem, name, direction, sets) for direction in DIRECTIONS for name in names]
        yield f"attention · {problem.name} · {problem.batch}×{problem.length}", cases


def _case(problem: Problem, implementation: str, direction: str, sets: Sequence[dict[str, Any]]) -> Case:
    labels = {
        "case": problem.name,
        "direction": direction,
        "implementation": implementation,
        "dense": problem.dense,
    }
    once = partial({"forward": attend, "both": both}[direction], implementation, problem)
    operations = DIRECTIONS[direction] * problem.heads * problem.size * problem.pairs()
    return Case(labels, lambda *sets: [once(arrays) for arrays in sets], tuple(sets), len(sets), operations)


def _other(row: Row, **labels: Any) -> dict[str, Any]:
    return {name: row[name] for name in ("case", "direction", "implementation")} | labels


BENCH = Bench(
    "Time attention, forward and with its gradients, by every implementation that this device has, beside cuDNN's and "
    "other kernels, out of a cold cache. The defaults suit a GPU.",
    AttentionSettings,
    tables,
    {"": "direction", "by": "implementation"},
    {
        "TFLOP/s": ("teraflops_per_second", ",.1f"),
        "× cuDNN": ("times_cudnn", ".2f"),
        "share": ("share", ".2f"),
    },
    {
        "times_cudnn": (
            lambda row: _other(row, implementation="cudnn"),
            lambda row, cudnn: cudnn["microseconds"] / row["microseconds"],
        ),
        "share": (
            lambda row: row["dense"] and _other(row, case=row["dense"]),
            lambda row, dense: dense["teraflops_per_second"] / row["teraflops_per_second"],
        ),
    },
)
