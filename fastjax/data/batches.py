"""Rows into batches.

The rows of a step are a function of the seed and the step alone: a resumed run needs nothing but its step. Every epoch
has its own permutation of the rows; its last batch is filled up with rows of padding, without targets. The order does
not depend on the division of a batch into microbatches. Padding behind the longest row of a batch is cut off, as far as
the lengths of the run's batches allow (`lengths`).

Of several processes each builds the rows that its devices take (`OwnRows`), in batches of the shapes of the whole ones.
"""

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from jaxtyping import Int, Int32, Int64, Shaped

from fastjax.data.grouping import ByLength
from fastjax.data.lengths import chosen_lengths
from fastjax.data.packing import PackedRows, RowArrays


class Batch(NamedTuple):
    """The arrays of one optimizer step; the first axis is gradient accumulation.

    Attributes:
        tokens: Token ids.
        targets: The token that follows each; -100 where it is not learnt.
        segment_ids: The document of each token within its row, from 1; 0 is padding. Attention stays within a segment.
        positions: The place of each token within its document.
        extra: Further fields of the rows, by name; a loss finds them in its rows.
    """

    tokens: Int32[np.ndarray, "A B S"]
    targets: Int32[np.ndarray, "A B S"]
    segment_ids: Int32[np.ndarray, "A B S"]
    positions: Int32[np.ndarray, "A B S"]
    extra: Mapping[str, Shaped[np.ndarray, "A B ..."]] = {}


class OwnRows(PackedRows):
    """The rows of a data set in one of several processes, which builds those of its own devices in each batch.

    Of the others it reads no token. Their places hold zeros, in memory that is never touched, but for the segments,
    which follow from the documents' lengths: a step's tokens are counted in them.

    Attributes:
        own: Places in a microbatch of the rows that are built.
        batch_size: Rows in a microbatch (B).
    """

    own: Int[np.ndarray, " _"]
    batch_size: int

    @classmethod
    def of(cls, rows: PackedRows, own: Int[np.ndarray, " _"], batch_size: int) -> "OwnRows":
        """The rows of a data set, for batches of one size.

        Args:
            rows: All of them.
            own: Places in a microbatch of the rows to build.
            batch_size: Rows in a microbatch (B).
        """
        owned = cls(*rows)
        owned.own, owned.batch_size = own, batch_size
        return owned

    def rows(self, indices: Sequence[int] | Int[np.ndarray, " B"]) -> RowArrays:
        """Build the arrays of microbatches, one behind the other.

        Args:
            indices: Row numbers; one outside [0, len(self)) is a row of padding.

        Returns:
            Arrays [len(indices), row_length]; of rows that are not this process's the segments alone.
        """
        indices = np.asarray(indices)
        built_here = np.isin(np.arange(len(indices)) % self.batch_size, self.own)
        rows = RowArrays(*(np.zeros((len(indices), self.row_length), np.int32) for _ in RowArrays._fields))
        for array, built in zip(rows, super().rows(indices[built_here]), strict=True):
            array[built_here] = built
        for row in np.flatnonzero(~built_here).tolist():
            members = np.array(self.members(int(indices[row])), np.int64)
            lengths = self.documents.offsets[members + 1] - self.documents.offsets[members]
            rows.segment_ids[row, : lengths.sum()] = np.repeat(np.arange(1, len(members) + 1), lengths)
        return rows


class BatchSource(Protocol):
    """The batches of a training loop: `Batches`, in memory, or `StreamedBatches`."""

    @property
    def steps_per_epoch(self) -> int | None:
        """Batches in an epoch; None: unknown."""
        ...

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens that a row of a batch may have, padding included, ascending; all rows of a step have as many."""
        ...

    def from_step(
        self, start: int = 0, stop: int | None = None, position: Mapping[str, Any] | None = None
    ) -> Iterator[Batch]:
        """The batches of the steps [start, stop), from `position(start)`."""
        ...

    def position(self, step: int) -> dict[str, Any]:
        """The state, as JSON, that a checkpoint after `step` steps stores for `from_step(step)`."""
        ...

    def row_numbers(self, step: int) -> Int64[np.ndarray, "A B"]:
        """The row numbers of a step's batch; -1: a row of padding."""
        ...

    def describe_rows(self, rows: Int[np.ndarray, " _"]) -> str:
        """Row numbers and the places of their examples, for people."""
        ...


class Batches(NamedTuple):
    """The batches of a run.

    Attributes:
        rows: The rows of the data set.
        batch_size: Rows in a microbatch (B).
        accumulation_steps: Microbatches in a batch (A).
        shuffle: Permute the rows of each epoch; otherwise they keep the data set's order.
        seed: Seed of the permutations.
        by_length: Orders rows so that those of a batch are of similar length; None: they are in any order.
        row_lengths: `lengths`; empty: every batch has whole rows.
    """

    rows: PackedRows
    batch_size: int
    accumulation_steps: int = 1
    shuffle: bool = True
    seed: int = 0
    by_length: ByLength | None = None
    row_lengths: tuple[int, ...] = ()

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens that a row of a batch may have, padding included, ascending; all rows of a step have as many."""
        return self.row_lengths or (self.rows.row_length,)

    def shortened(self, steps: int, multiple: int = 1, before: tuple[int, ...] = ()) -> "Batches":
        """These batches without the padding behind their longest rows, in a few lengths that suit the run.

        Args:
            steps: Steps of the run.
            multiple: Divides every length, as it does that of a row.
            before: The lengths of the run that is resumed, which stay.
        """
        longest = self._tokens(steps).max(axis=1)
        return self._replace(row_lengths=chosen_lengths(longest, self.rows.row_length, multiple, before))

    def slots_filled(self, steps: int) -> float:
        """The share of tokens that are no padding.

        Args:
            steps: Steps of the run.
        """
        tokens, lengths = self._tokens(steps), np.array(self.lengths)
        slots = lengths[np.searchsorted(lengths, tokens.max(axis=1))] * tokens.shape[1]
        return float(tokens.sum() / slots.sum())

    def _tokens(self, steps: int) -> Int64[np.ndarray, "steps rows"]:
        """Tokens of the rows of each step, without padding."""
        tokens, size = np.append(self.rows.lengths, 0), self.accumulation_steps * self.batch_size
        epochs = [
            np.pad(self._order(epoch), (0, -len(self.rows) % size), constant_values=-1)
            for epoch in range(-(-steps // self.steps_per_epoch))
        ]
        return tokens[np.concatenate(epochs)].reshape(-1, size)[:steps]

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch, the last one padded."""
        return -(-len(self.rows) // (self.batch_size * self.accumulation_steps))

    def batch(self, step: int) -> Batch:
        """The batch of a step.

        Args:
            step: The step of the run, from 0.
        """
        return cut(batch_of(self.rows, self.row_numbers(step)), self.lengths)

    def row_numbers(self, step: int) -> Int64[np.ndarray, "A B"]:
        """The row numbers of a step's batch.

        Args:
            step: The step of the run, from 0.

        Returns:
            Indices into `rows`; -1: a row of padding.
        """
        epoch, index = divmod(step, self.steps_per_epoch)
        size = self.accumulation_steps * self.batch_size
        chosen = self._order(epoch)[index * size : (index + 1) * size]
        padded = np.pad(chosen, (0, size - len(chosen)), constant_values=-1)
        return padded.reshape(self.accumulation_steps, self.batch_size)

    def _order(self, epoch: int) -> Int64[np.ndarray, " R"]:
        """The rows of an epoch in order."""
        if self.by_length is not None:
            return self.by_length.order(self.accumulation_steps * self.batch_size, (self.seed, epoch))
        return _order(len(self.rows), (self.seed, epoch) if self.shuffle else None)

    def describe_rows(self, rows: Int[np.ndarray, " _"]) -> str:
        """Row numbers and the places of their examples, for people.

        Args:
            rows: Row numbers; padding is left out.

        Returns:
            For instance "row 17 (train.jsonl:12, 95); row 3 (train.jsonl:4)".
        """
        return "; ".join(f"row {row} ({self.rows.describe(row)})" for row in np.ravel(rows).tolist() if row >= 0)

    def position(self, step: int) -> dict[str, Any]:
        """The state of a checkpoint after `step` steps: the lengths of batches, since the step is enough for the rows.

        Args:
            step: Steps taken.
        """
        return {"lengths": list(self.row_lengths)} if self.row_lengths else {}

    def from_step(
        self, start: int = 0, stop: int | None = None, position: Mapping[str, Any] | None = None
    ) -> Iterator[Batch]:
        """The batches of successive steps.

        Args:
            start: The first step.
            stop: The step to stop before; None: never.
            position: Unused.

        Yields:
            The batch of each step.
        """
        for step in itertools.count(start) if stop is None else range(start, stop):
            yield self.batch(step)

    def epoch(self, epoch: int = 0) -> Iterator[Batch]:
        """The batches of one epoch.

        Args:
            epoch: Which epoch, from 0.

        Yields:
            `steps_per_epoch` batches.
        """
        yield from self.from_step(epoch * self.steps_per_epoch, (epoch + 1) * self.steps_per_epoch)


def batch_of(rows: PackedRows, numbers: Int[np.ndarray, "A B"], documents_per_row: int | None = None) -> Batch:
    """The batch of rows, with the fields of their documents.

    Args:
        rows: The rows of a data set.
        numbers: Numbers of the batch's rows; one outside [0, len(rows)) is a row of padding.
        documents_per_row: Room for documents in the fields (D); None: what `rows` need.

    Returns:
        The batch; a field of the rows is one of its `extra`, [A, B, D]: at place d the number of the document of
        segment d + 1, 0 where there is none.
    """
    batch = stack(rows.rows(numbers.ravel()), numbers.shape)
    if not rows.fields:
        return batch
    members = [rows.members(int(number)) for number in numbers.ravel()]
    shape = (len(members), documents_per_row or rows.documents_per_row)
    extra = {name: np.zeros(shape, values.dtype) for name, values in rows.fields.items()}
    for name, values in rows.fields.items():
        for row, documents in enumerate(members):
            extra[name][row, : len(documents)] = values[documents]
    return batch._replace(extra={name: values.reshape(*numbers.shape, -1) for name, values in extra.items()})


def cut(batch: Batch, lengths: Sequence[int]) -> Batch:
    """A batch without the padding behind its longest row, as far as one of the lengths reaches.

    Args:
        batch: The batch.
        lengths: Ascending; the last one reaches to the end of its rows.
    """
    if lengths[0] == batch.tokens.shape[-1]:
        return batch
    used = np.flatnonzero(batch.segment_ids.any(axis=(0, 1)))
    longest = int(used[-1]) + 1 if used.size else 0
    length = next(length for length in lengths if length >= longest)
    tokens, targets, segment_ids, positions = (array[..., :length] for array in batch[:4])
    return Batch(tokens, targets, segment_ids, positions, batch.extra)


def stack(rows: RowArrays, shape: tuple[int, ...]) -> Batch:
    """Reshape A * B rows to a batch.

    Args:
        rows: The rows.
        shape: (A, B).
    """
    tokens, targets, segment_ids, positions = (array.reshape(*shape, array.shape[-1]) for array in rows)
    return Batch(tokens, targets, segment_ids, positions)


@functools.lru_cache(maxsize=2)
def _order(num_rows: int, seed: tuple[int, int] | None) -> Int64[np.ndarray, " R"]:
    """The rows of an epoch in order; cached, because every step of the epoch reads it."""
    return np.arange(num_rows) if seed is None else np.random.default_rng(seed).permutation(num_rows)
