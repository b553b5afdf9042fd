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
from typing import TYPE_CHECKING

from rich.console import Console

from fastjax.bench.tables import Row, number, print_rows
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


_COLUMNS = {
    "examples/s": number("examples_per_second", ",.0f"),
    "tokens/s": number("tokens_per_second", ",.0f"),
    "of the tokenizer": number("ratio", ".3f"),
    "rows/ideal": number("rows_over_ideal", ".4f"),
    "seconds": number("prepare_seconds", ".2f"),
    "cached": number("cached_seconds", ".2f"),
}


def run(case: DataCase, output: Path | None = None, console: Console | None = None) -> Row:
    """Measure and print.

    Args:
        case: the settings.
        output: a JSON file to write; None: none.
        console: for the table; None: standard output.

    Returns:
        Seconds of the bare tokenizer (`bare_seconds`), of preparing, and until prepared data are back from the cache;
        the speed of preparing as a part of the bare tokenizer's (`ratio`); rows over the fewest that could hold the
        tokens (`rows_over_ideal`); and counts.

    Raises:
        ConfigError: a missing tokenizer or template.
        DataError: a fault in the data.
        OSError: a file cannot be read or written.
    """
    with _one_core(), tempfile.TemporaryDirectory() as cache:
        found = _measure(case, Path(cache))
    title = "preparing data, on one core"
    print_rows(console or Console(), title, [found], {}, _COLUMNS, reason=lambda row: None)
    if output is not None:
        output.write_text(json.dumps({"case": dataclasses.asdict(case), "result": found}, indent=2))
    return found


def _measure(case: DataCase, cache: Path) -> Row:
    from fastjax.data import Encoder, load_tokenizer, prepare
    from fastjax.data.sources import open_sources

    tokenizer = load_tokenizer(case.tokenizer)

    def prepared(cache_dir: Path | None = None) -> "Dataset":
        return prepare(case.data, tokenizer, case.seq, chat_template=case.chat_template, cache_dir=cache_dir)

    counts = prepared(cache).statistics
    (source,) = open_sources(case.data)
    texts = Encoder(tokenizer).texts(source.records(templated=case.chat_template is not None))
    encode = tokenizer.backend_tokenizer.encode_batch
    turns = [
        (_seconds(lambda: encode(texts, add_special_tokens=False)), _seconds(prepared)) for _ in range(case.rounds)
    ]
    bare, best = map(min, zip(*turns, strict=True))
    return {
        "examples": counts.examples,
        "tokens": counts.tokens,
        "rows": counts.rows,
        "rows_over_ideal": counts.rows / -(-counts.tokens // case.seq),
        "bare_seconds": bare,
        "prepare_seconds": best,
        "ratio": bare / best,
        "cached_seconds": min(_seconds(lambda: prepared(cache)) for _ in range(case.rounds)),
        "examples_per_second": counts.examples / best,
        "tokens_per_second": counts.tokens / best,
    }


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
