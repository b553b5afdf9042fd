"""Speed of data preparation, beside the bare tokenizer on the same texts.

Both run by turns, on one core, and the processor's time is counted, so that the machine's other work counts little.
Preparing is everything from the file to packed rows: reading, the template, tokens, the loss mask, and
packing. The bare tokenizer is `encode_batch` of the finished texts. The best of all rounds counts for both.
"""

import contextlib
import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console

from fastjax.bench.results import make_table
from fastjax.data.settings import DataSource

if TYPE_CHECKING:
    from fastjax.data import Dataset


@dataclasses.dataclass(frozen=True)
class DataCase:
    """Settings of the measurement.

    Attributes:
        data: a data set.
        tokenizer: a folder with a tokenizer.
        seq: tokens a row.
        chat_template: a named template or a file; None: the tokenizer's own.
        rounds: runs of each side.
    """

    data: DataSource
    tokenizer: str
    seq: int = 2048
    chat_template: str | None = None
    rounds: int = 5


class DataTiming(NamedTuple):
    """Result of the measurement.

    Attributes:
        examples: examples in the data set.
        tokens: tokens in its rows.
        rows: its rows.
        rows_over_ideal: these, over the fewest that could hold the tokens.
        bare_seconds: the bare tokenizer's time.
        prepare_seconds: the time of preparing.
        ratio: the former over the latter: the speed of preparing as a part of the bare tokenizer's.
        cached_seconds: the time until the prepared data are back from the cache.
        examples_per_second: prepared.
        tokens_per_second: prepared.
    """

    examples: int
    tokens: int
    rows: int
    rows_over_ideal: float
    bare_seconds: float
    prepare_seconds: float
    ratio: float
    cached_seconds: float
    examples_per_second: float
    tokens_per_second: float


def run(case: DataCase, output: Path | None = None, console: Console | None = None) -> DataTiming:
    """Measure and print.

    Args:
        case: the settings.
        output: a JSON file to write; None: none.
        console: for the table; None: standard output.

    Returns:
        The result.

    Raises:
        ConfigError: a missing tokenizer or template.
        DataError: a fault in the data.
        OSError: a file cannot be read or written.
    """
    console = console or Console()
    with _one_core(), tempfile.TemporaryDirectory() as cache:
        timing = _measure(case, Path(cache))
    names = ("examples/s", "tokens/s", "of the tokenizer", "rows/ideal", "seconds", "cached")
    table = make_table("preparing data, on one core", (), names)
    table.add_row(
        f"{timing.examples_per_second:,.0f}",
        f"{timing.tokens_per_second:,.0f}",
        f"{timing.ratio:.3f}",
        f"{timing.rows_over_ideal:.4f}",
        f"{timing.prepare_seconds:.2f}",
        f"{timing.cached_seconds:.2f}",
    )
    console.print(table)
    if output is not None:
        output.write_text(json.dumps({"case": dataclasses.asdict(case), "result": timing._asdict()}, indent=2))
    return timing


def _measure(case: DataCase, cache: Path) -> DataTiming:
    from fastjax.data import Encoder, load_tokenizer, prepare
    from fastjax.data.sources import open_sources

    tokenizer = load_tokenizer(case.tokenizer)

    def prepared(cache_dir: Path | None = None) -> "Dataset":
        return prepare(case.data, tokenizer, case.seq, chat_template=case.chat_template, cache_dir=cache_dir)

    dataset = prepared(cache)
    (source,) = open_sources(case.data)
    texts = Encoder(tokenizer).texts(source.records(templated=case.chat_template is not None))
    backend = tokenizer.backend_tokenizer
    bare_seconds, prepare_seconds = [], []
    for _ in range(case.rounds):
        bare_seconds.append(_seconds(lambda: backend.encode_batch(texts, add_special_tokens=False)))
        prepare_seconds.append(_seconds(prepared))
    cached_seconds = min(_seconds(lambda: prepared(cache)) for _ in range(case.rounds))
    statistics = dataset.statistics
    best = min(prepare_seconds)
    return DataTiming(
        examples=statistics.examples,
        tokens=statistics.tokens,
        rows=statistics.rows,
        rows_over_ideal=statistics.rows / -(-statistics.tokens // case.seq),
        bare_seconds=min(bare_seconds),
        prepare_seconds=best,
        ratio=min(bare_seconds) / best,
        cached_seconds=cached_seconds,
        examples_per_second=statistics.examples / best,
        tokens_per_second=statistics.tokens / best,
    )


def _seconds(function: Callable[[], object]) -> float:
    """The processor's time for a call, without that for freeing its result."""
    start = time.process_time()
    result = function()
    seconds = time.process_time() - start
    del result
    return seconds


@contextlib.contextmanager
def _one_core() -> Iterator[None]:
    """Keep this process, and the tokenizer's threads, on one core."""
    name, before = "RAYON_NUM_THREADS", os.environ.get("RAYON_NUM_THREADS")
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    os.environ[name] = "1"  # read by the tokenizer when it first works
    if cores:
        os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        if cores:
            os.sched_setaffinity(0, cores)
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
