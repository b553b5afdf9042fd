"""Rows into batches.

Which rows a step trains on is a function of the step alone, given the seed: an interrupted run goes on where it
stopped, with nothing to store but the step. Every epoch has its own order, and every row is in every epoch once; the
last batch of an epoch is filled up with rows of padding, which no target counts. The order does not depend on how a
batch is divided into microbatches.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from jaxtyping import Int, Int32, Int64, Shaped

from fastjax.data.packing import PackedRows, Rows


class Batch(NamedTuple):
    """What one optimizer step trains on; the first axis is that of gradient accumulation.

    Attributes:
        tokens: Token ids.
        targets: For each token the one to predict, that is the one that follows it; -100 where nothing is learnt.
        segment_ids: The document of each token within its row, from 1; 0 is padding. Attention stays within a segment.
        positions: The place of each token within its document.
        extra: Further fields of the rows, by name; a loss finds them in its rows.
    """

    tokens: Int32[np.ndarray, "A B S"]
    targets: Int32[np.ndarray, "A B S"]
    segment_ids: Int32[np.ndarray, "A B S"]
    positions: Int32[np.ndarray, "A B S"]
    extra: Mapping[str, Shaped[np.ndarray, "A B ..."]] = {}


class BatchSource(Protocol):
    """Where a training loop gets its batches from: `Batches`, all in memory, or `StreamedBatches`."""

    @property
    def steps_per_epoch(self) -> int | None:
        """Batches in an epoch; None where it is not known."""
        ...

    def from_step(
        self, start: int = 0, stop: int | None = None, position: Mapping[str, Any] | None = None
    ) -> Iterator[Batch]:
        """The batches of the steps [start, stop), given what `position(start)` was."""
        ...

    def position(self, step: int) -> dict[str, Any]:
        """What to store, as JSON, with a checkpoint after `step` steps, so that `from_step(step)` goes on."""
        ...

    def row_numbers(self, step: int) -> Int64[np.ndarray, "A B"]:
        """The numbers of the rows in a step's batch; -1 is a row of padding."""
        ...

    def describe_rows(self, rows: Int[np.ndarray, " _"]) -> str:
        """Rows, by their numbers, with the examples in them, as a user can find them."""
        ...


class Batches(NamedTuple):
    """The batches of a run.

    Attributes:
        rows: The rows of the data set.
        batch_size: Rows in a microbatch (B).
        accumulation_steps: Microbatches in a batch (A).
        shuffle: Whether each epoch has an order of its own; if not, all have that of the data set.
        seed: What the orders are drawn from.
    """

    rows: PackedRows
    batch_size: int
    accumulation_steps: int = 1
    shuffle: bool = True
    seed: int = 0

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch, the last one perhaps not full."""
        return -(-len(self.rows) // (self.batch_size * self.accumulation_steps))

    def batch(self, step: int) -> Batch:
        """The batch of a step.

        Args:
            step: The number of the step in the run, from 0; epoch after epoch.

        Returns:
            Its batch.
        """
        numbers = self.row_numbers(step)
        return stack(self.rows.rows(numbers.ravel()), numbers.shape)

    def row_numbers(self, step: int) -> Int64[np.ndarray, "A B"]:
        """The rows in a step's batch.

        Args:
            step: The number of the step in the run, from 0.

        Returns:
            Their numbers in the data set; -1 is a row of padding.
        """
        epoch, index = divmod(step, self.steps_per_epoch)
        per_batch = self.batch_size * self.accumulation_steps
        order = _order(len(self.rows), (self.seed, epoch) if self.shuffle else None)
        chosen = order[index * per_batch : (index + 1) * per_batch]
        chosen = np.pad(chosen, (0, per_batch - len(chosen)), constant_values=-1)
        return chosen.reshape(self.accumulation_steps, self.batch_size)

    def describe_rows(self, rows: Int[np.ndarray, " _"]) -> str:
        """Rows with the examples in them, as a user can find them.

        Args:
            rows: Their numbers; rows of padding are left out.

        Returns:
            For instance "row 17 (train.jsonl:12, 95); row 3 (train.jsonl:4)".
        """
        return "; ".join(f"row {row} ({self.rows.describe(row)})" for row in np.ravel(rows).tolist() if row >= 0)

    def position(self, step: int) -> dict[str, Any]:
        """What a checkpoint stores after `step` steps: nothing, the step says it all.

        Args:
            step: The number of steps taken.
        """
        return {}

    def from_step(
        self, start: int = 0, stop: int | None = None, position: Mapping[str, Any] | None = None
    ) -> Iterator[Batch]:
        """The batches of successive steps.

        Args:
            start: The first step.
            stop: The step to stop before; None: never.
            position: Not needed here.

        Yields:
            The batch of each step.
        """
        step = start
        while stop is None or step < stop:
            yield self.batch(step)
            step += 1

    def epoch(self, epoch: int = 0) -> Iterator[Batch]:
        """The batches of one epoch.

        Args:
            epoch: Which epoch, from 0.

        Yields:
            `steps_per_epoch` batches.
        """
        yield from self.from_step(epoch * self.steps_per_epoch, (epoch + 1) * self.steps_per_epoch)


def stack(rows: Rows, shape: tuple[int, ...]) -> Batch:
    """Rows as a batch.

    Args:
        rows: A * B rows.
        shape: (A, B).

    Returns:
        The batch.
    """
    tokens, targets, segment_ids, positions = (array.reshape(*shape, array.shape[-1]) for array in rows)
    return Batch(tokens, targets, segment_ids, positions)


@functools.lru_cache(maxsize=2)
def _order(num_rows: int, seed: tuple[int, int] | None) -> np.ndarray:
    """The order of an epoch; remembered, because every step of the epoch asks for it."""
    return np.arange(num_rows) if seed is None else np.random.default_rng(seed).permutation(num_rows)
