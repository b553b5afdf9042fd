"""Batches from data sets that are read during training.

Examples are read, encoded and packed in windows of a few hundred rows. A window's rows are shuffled and dealt out to
batches; the remainder begins the next window's first batch. A thread makes the next window during the training on this
one. At their end the data begin again, in other windows; of a mixture with weights each data set at its own end, while
the others go on.

The beginning of a window determines it: the number of examples taken from each data set. A checkpoint stores this and
the number of rows dealt out; the window is made again from them.
"""

import collections
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Int, Int64

from fastjax.data import notes
from fastjax.data.batches import Batch, cut, stack
from fastjax.data.documents import Counts, Documents, Examples
from fastjax.data.encoded import Say, nothing_to_learn
from fastjax.data.lengths import streamed_lengths
from fastjax.data.mixture import next_source
from fastjax.data.packing import Origins, PackedRows, RowArrays, pack_documents
from fastjax.data.pipeline import identity, open_data, shaped_by, timed_encoder
from fastjax.data.prefetch import Prefetched
from fastjax.data.records import Record
from fastjax.data.settings import NO_CACHE, DataOptions
from fastjax.data.sources import OpenSource, Sources
from fastjax.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

WINDOW = 256
"""Rows of a window, at least: enough for best-fit packing without waste, and for a few steps."""

_READ = 250
"""Examples read between two checks for a full window."""

_REMEMBERED = 4096
"""Latest steps whose rows are known."""


class StreamPosition(NamedTuple):
    """A position in the data sets.

    Attributes:
        taken: Examples taken from each since its last beginning.
        drawn: Examples taken from each in all.
        window: Windows made.
        rows: Rows made.
    """

    taken: tuple[int, ...]
    drawn: tuple[int, ...]
    window: int = 0
    rows: int = 0


class _Window(NamedTuple):
    """Rows of successive examples.

    Attributes:
        start: The position of the first example.
        rows: Their rows.
        order: The order of dealing out.
    """

    start: StreamPosition
    rows: PackedRows
    order: np.ndarray


class StreamedBatches:
    """Batches of data sets that are read during training; a `BatchSource`.

    With weights, every data set has its share of the examples at any time; see `next_source`. There are no epochs: a
    data set begins again at its own end, and the others go on, so that every example has its turn.

    Attributes:
        fingerprint: A fingerprint of everything that shapes the rows: the data sets, the tokenizer, the options.
        counts: Counts of the examples read so far, ahead of training.
        lengths: Tokens that a row of a batch may have, ascending.
        now: See `Dataset`.
    """

    steps_per_epoch = None

    def __init__(
        self,
        sources: Sources,
        tokenizer: "PreTrainedTokenizerFast",
        max_seq_length: int,
        batch_size: int,
        accumulation_steps: int = 1,
        options: DataOptions = NO_CACHE,
        *,
        seed: int = 0,
        multiple: int = 1,
        now: str | None = None,
        progress: Say | None = None,
    ):
        """Open the data sets; nothing is read yet.

        Args:
            sources: A path, a description of a data set, rows in memory (a `datasets.Dataset`, an iterable of dicts),
                or several of these.
            tokenizer: The model's tokenizer; it has the options' chat template afterwards.
            max_seq_length: Tokens in a row.
            batch_size: Rows in a microbatch (B).
            accumulation_steps: Microbatches in a batch (A).
            options: The treatment of the rows; nothing is held out, and nothing kept.
            seed: Seed of the order of the rows.
            multiple: Divides the lengths of batches, as it does `max_seq_length`.
            now: See `prepare`.
            progress: Takes a message at the first row with special tokens in its content.

        Raises:
            OSError: A missing file or data set.
            ConfigError: A tokenizer without EOS or the template's tokens; a wrong option.
            DataError: `datasets` cannot read a data set.
        """
        self._sources = open_data(sources, tokenizer, options, streaming=True)
        self._encoder, self.now = timed_encoder(tokenizer, options, now)
        self.fingerprint = identity(self._sources, tokenizer, [*shaped_by(options, max_seq_length), seed])
        self.counts = Counts()
        self.notes: notes.Notes = {}
        self._row_length = max_seq_length
        self.lengths = (max_seq_length,) if options.packing else streamed_lengths(max_seq_length, multiple)
        self._shape = (accumulation_steps, batch_size)
        self._seed = seed
        self._progress = progress
        self._positions: dict[int, dict[str, Any]] = {}
        self._numbers: dict[int, np.ndarray] = {}
        self._windows: collections.deque[_Window] = collections.deque(maxlen=8)

    def from_step(
        self, start: int = 0, stop: int | None = None, position: Mapping[str, Any] | None = None
    ) -> Iterator[Batch]:
        """The batches of successive steps.

        Args:
            start: The first step.
            stop: The step to stop before; None: never.
            position: `position(start)`; None: the data are read again up to `start`.

        Yields:
            The batch of each step.

        Raises:
            OSError: Unreadable data.
            DataError: An invalid row, no row, or no target token.
        """
        if position:
            step = start
            start_of_window = StreamPosition(
                tuple(position["taken"]), tuple(position["drawn"]), position["window"], position["rows"]
            )
            dealt = int(position["dealt"])
        else:
            nothing = (0,) * len(self._sources)
            step, start_of_window, dealt = 0, StreamPosition(nothing, nothing), 0
        self._positions[step] = _position(start_of_window, dealt)
        per_batch = self._shape[0] * self._shape[1]
        with Prefetched(self._make_windows(start_of_window), depth=1) as windows:
            waiting: list[tuple[_Window, int]] = []  # rows to deal out, by their place in the order
            while stop is None or step < stop:
                while len(waiting) < per_batch:
                    window = next(windows)
                    self._windows.append(window)
                    waiting += [(window, n) for n in range(dealt, len(window.order))]
                    dealt = 0
                batch, waiting = waiting[:per_batch], waiting[per_batch:]
                self._remember(step, batch, waiting)
                if step >= start:
                    yield self._batch(batch)
                step += 1

    def position(self, step: int) -> dict[str, Any]:
        """The state, as JSON, that a checkpoint after `step` steps stores.

        Args:
            step: Steps taken, one of the latest.

        Raises:
            ValueError: A step not reached, or long past.
        """
        if step not in self._positions:
            raise ValueError(f"the position after step {step} is not known; known are those after the latest steps")
        return self._positions[step]

    def row_numbers(self, step: int) -> Int64[np.ndarray, "A B"]:
        """The row numbers of a step's batch.

        Args:
            step: The step, from 0, one of the latest.

        Returns:
            Numbers counted from the beginning of the run.
        """
        return self._numbers[step]

    def describe_rows(self, rows: Int[np.ndarray, " _"]) -> str:
        """Row numbers and the places of their examples, for people.

        Args:
            rows: Row numbers.

        Returns:
            For instance "row 17 (train.jsonl:12, 95)".
        """
        return "; ".join(f"row {row} ({self._describe(row)})" for row in np.ravel(rows).tolist() if row >= 0)

    def _describe(self, row: int) -> str:
        for window in list(self._windows):
            index = row - window.start.rows
            if 0 <= index < len(window.rows):
                return window.rows.describe(index)
        return "no longer known"

    def _remember(self, step: int, batch: list[tuple[_Window, int]], waiting: list[tuple[_Window, int]]) -> None:
        """Record a step's rows and the position of the next."""
        numbers = [window.start.rows + int(window.order[n]) for window, n in batch]
        self._numbers[step] = np.array(numbers, np.int64).reshape(self._shape)
        if waiting:
            position = _position(waiting[0][0].start, waiting[0][1])
        else:
            window, n = batch[-1]
            position = _position(window.start, n + 1)
        self._positions[step + 1] = position
        self._positions.pop(step + 1 - _REMEMBERED, None)
        self._numbers.pop(step - _REMEMBERED, None)

    def _batch(self, batch: list[tuple[_Window, int]]) -> Batch:
        parts = []
        for _, group in itertools.groupby(batch, key=lambda item: item[0].start.window):
            (window, *_), places = zip(*group, strict=True)
            parts.append(window.rows.rows(window.order[list(places)]))
        rows = RowArrays(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
        return cut(stack(rows, self._shape), self.lengths)

    def _make_windows(self, start: StreamPosition) -> Iterator[_Window]:
        options = self._encoder.options
        reader = _Reader(self._sources, start, templated=options.chat_template is not None)
        while True:
            reader.restarts = [0] * len(self._sources)
            records: list[Record] = []
            parts: list[Documents] = []
            tokens = 0
            while tokens < WINDOW * self._row_length:
                chunk = reader.read(_READ)
                records += chunk
                for examples in self._encoder.encode(chunk):
                    self._note(examples, records[sum(part.counts.examples for part in parts) :])
                    parts.append(Documents.of(examples, self._row_length, options.too_long))
                    tokens += len(parts[-1].tokens)
                if not tokens and min(reader.restarts) > 1:  # all of every data set was seen
                    names = ", ".join(source.source.path for source in self._sources)
                    raise DataError(
                        nothing_to_learn(names, Documents.concatenate(parts), self._row_length, options.loss_on)
                    )
            documents = Documents.concatenate(parts)
            self.counts = Counts(*np.add(self.counts, documents.counts).tolist())
            origins = Origins.of(record.where for record in records)
            rows = pack_documents(documents, self._row_length, packing=options.packing, origins=origins)
            yield _Window(start, rows, np.random.default_rng((self._seed, start.window)).permutation(len(rows)))
            start = reader.position(start.window + 1, start.rows + len(rows))

    def _note(self, examples: Examples, records: Sequence[Record]) -> None:
        """Count rows that people should know of, and report the first of each kind."""
        for kind in notes.add(self.notes, examples.noted, records):
            if self._progress is not None:
                self._progress(
                    f"{self.notes[kind][1]}: the first row {notes.say(kind, self._encoder.options.special_tokens)}"
                )


class _Reader:
    """The endless sequence of the mixture's examples."""

    def __init__(self, sources: Sequence[OpenSource], start: StreamPosition, templated: bool):
        self._sources = sources
        self._templated = templated
        self._taken = list(start.taken)
        self._drawn = list(start.drawn)
        self._weights = [source.source.weight or 0.0 for source in sources]
        self._open = [self._records(n, skip) for n, skip in enumerate(self._taken)]
        # Without weights the data sets come in turn, and those behind the present one are untouched.
        self._turn = max((n for n, taken in enumerate(self._taken) if taken), default=0)
        self.restarts = [0] * len(sources)

    def position(self, window: int, rows: int) -> StreamPosition:
        """The position of the next example."""
        return StreamPosition(tuple(self._taken), tuple(self._drawn), window, rows)

    def read(self, count: int) -> list[Record]:
        """The next examples."""
        records: list[Record] = []
        while len(records) < count:
            n = next_source(self._weights, self._drawn) if any(self._weights) else self._turn
            record = next(self._open[n], None)
            if record is None:
                self._end(n)
                continue
            self._taken[n] += 1
            self._drawn[n] += 1
            records.append(record)
        return records

    def _end(self, ended: int) -> None:
        """Continue after the end of a data set."""
        if not self._taken[ended]:
            raise DataError(f"{self._sources[ended].source.path}: no examples")
        if any(self._weights):
            again = [ended]
        else:
            self._turn = (self._turn + 1) % len(self._sources)
            again = [] if self._turn else range(len(self._sources))
        for n in again:
            self.restarts[n] += 1
            self._taken[n] = 0
            self._open[n] = self._records(n, 0)

    def _records(self, n: int, skip: int) -> Iterator[Record]:
        return self._sources[n].records(templated=self._templated, skip=skip)


def _position(start: StreamPosition, dealt: int) -> dict[str, Any]:
    return start._asdict() | {"taken": list(start.taken), "drawn": list(start.drawn), "dealt": dealt}
