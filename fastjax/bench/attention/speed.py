"""Speed of attention: every case by every contender, forward and forward with backward.

Each goes over as many sets of inputs as exceed the second-level cache several times, so that it finds none of them
there. TFLOP/s count unmasked work. The share is the time over the unmasked part of the contender's own time for the
same rows without the mask; 1 would be a kernel that loses nothing.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console

from fastjax.bench import plot, tables
from fastjax.bench.attention.cases import NAMES, Problem, check_names, make_arrays, make_problems, read_lengths
from fastjax.bench.attention.contenders import CONTENDERS, both, default_contenders
from fastjax.bench.tables import Bench, Beside, Case, Row, number, word
from fastjax.training.report.panels import COLOURS
from pallas_kernels import dispatch

DIRECTIONS = {"forward": "Forward, TFLOP/s", "both": "Forward and backward, TFLOP/s"}
_COLOURS = {
    "mosaic": COLOURS["blue"][0],
    "cudnn": COLOURS["green"][0],
    "triton": COLOURS["orange"][0],
    "jax_mosaic": COLOURS["pink"][0],
    "jax_triton": COLOURS["red"][0],
    "tokamax": "#56B4E9",
    "xla": COLOURS["grey"][0],
}


@dataclasses.dataclass(frozen=True)
class SpeedCase:
    """Settings of the measurement.

    Attributes:
        cases: of `cases.NAMES`.
        implementations: of `CONTENDERS`; empty: `default_contenders`.
        batch: rows.
        seq: tokens of a short row; a long one has twice as many.
        heads: query heads.
        kv_heads: key heads.
        dtype: of the arrays.
        lengths: a file with the lengths of documents to pack; None: `chat_lengths`.
        cold_bytes: bytes of inputs that a program goes over.
        rounds: runs; their median counts.
    """

    cases: tuple[str, ...] = NAMES
    implementations: tuple[str, ...] = ()
    batch: int = 4
    seq: int = 4096
    heads: int = 32
    kv_heads: int = 8
    dtype: str = "bfloat16"
    lengths: Path | None = None
    cold_bytes: int = 256 * 2**20
    rounds: int = 9


def run(
    given: SpeedCase, output: Path | None = None, picture: Path | None = None, console: Console | None = None
) -> list[Row]:
    """Measure as `tables.run`, and draw.

    Args:
        given: the settings.
        output: JSON file; None: no file.
        picture: PNG of TFLOP/s; None: no file.
        console: for the tables.

    Returns:
        Their rows.

    Raises:
        ConfigError: sizes or lengths that do not fit.
        OSError: a file that cannot be read or written.
    """
    console = console or Console()
    documents = {problem.name: problem.documents for problem in _problems(given)}
    rows = tables.run(BENCH, given, output, console, documents=documents)
    if picture is not None:
        picture.write_bytes(draw(rows, f"Attention · {dispatch.target()} · {given.dtype} · jax {jax.__version__}"))
        console.print(f"written to {picture}", highlight=False)
    return rows


def draw(rows: Sequence[Row], title: str) -> bytes:
    """TFLOP/s by case and contender, forward above forward with backward, as a PNG.

    Args:
        rows: of the tables; those without a time leave a gap.
        title: over both plots.
    """
    cases = dict.fromkeys((row["case"], row["title"].replace(" ", "\n", 1)) for row in rows)
    names = [name for name in _COLOURS if any(row["implementation"] == name and not row["reason"] for row in rows)]
    found = {(row["direction"], row["implementation"], row["case"]): row["teraflops_per_second"] or 0.0 for row in rows}
    panels = {
        words: {name: [found.get((direction, name, case), 0.0) for case, _ in cases] for name in names}
        for direction, words in DIRECTIONS.items()
    }
    return plot.draw(title, [label for _, label in cases], panels, _COLOURS)


def _problems(given: SpeedCase) -> list[Problem]:
    check_names("--cases", given.cases, NAMES)
    check_names("--implementations", given.implementations, tuple(CONTENDERS))
    lengths = None if given.lengths is None else read_lengths(given.lengths)
    return make_problems(given.cases, given.batch, given.seq, given.heads, given.kv_heads, lengths)


def _tables(given: SpeedCase) -> Iterator[tuple[str, list[Case]]]:
    for problem in _problems(given):
        numbers = 2 * problem.batch * problem.length * (problem.heads + problem.kv_heads) * problem.size
        # so many sets of inputs that together they exceed any cache
        count = max(1, -(-given.cold_bytes // (numbers * jnp.dtype(given.dtype).itemsize)))
        sets = tuple(make_arrays(problem, given.dtype, count))
        cases = [
            _case(problem, implementation, direction, sets)
            for direction in DIRECTIONS
            for implementation in given.implementations or default_contenders()
        ]
        yield f"attention · {problem}", cases


def _case(problem: Problem, implementation: str, direction: str, sets: tuple[dict[str, Any], ...]) -> Case:
    labels = {
        "case": problem.name,
        "title": str(problem),
        "direction": direction,
        "implementation": implementation,
        "dense": problem.dense,
    }
    try:
        attend = CONTENDERS[implementation](problem)
    except Exception as error:
        return Case(labels, error)
    function = _over_all(both(attend) if direction == "both" else attend)
    return Case(labels, function, sets, len(sets), problem.operations(direction))


def _over_all(function: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    return lambda *sets: [function(arrays) for arrays in sets]


def _other(row: Row, **labels: Any) -> dict[str, Any]:
    return {name: row[name] for name in ("case", "direction", "implementation")} | labels


BENCH = Bench(
    SpeedCase,
    _tables,
    {"": word("direction"), "by": word("implementation")},
    {
        "TFLOP/s": number("teraflops_per_second", lambda rate: f"{rate:,.{0 if rate >= 10 else 3}f}"),
        "× cuDNN": number("times_cudnn", ".2f"),
        "share": number("share", ".2f"),
    },
    beside={
        "times_cudnn": Beside(
            lambda row: _other(row, implementation="cudnn"),
            lambda row, cudnn: cudnn["milliseconds"] / row["milliseconds"],
        ),
        "share": Beside(
            lambda row: row["dense"] and _other(row, case=row["dense"]),
            lambda row, dense: dense["teraflops_per_second"] / row["teraflops_per_second"],
        ),
    },
)
