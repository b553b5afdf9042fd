"""Rows into batches.

Which rows a step trains on is a function of the step alone, given the seed: an interrupted run goes on where it
stopped, with nothing to store but the step. Every epoch has its own order, and every row is in every epoch once; the
last batch of an epoch is filled up with rows of padding, which no target counts.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from fastjax.data.packing import PackedRows, Rows


class Batch(NamedTuple):
    """What one optimizer step trains on; the first axis is that of gradient accumulation.

    Attributes:
        tokens: Token ids.
        targets: For each token the one to predict, that is the one that follows it; -100 where nothing is learnt.
        segment_ids: The document of each token within its row, from 1; 0 is padding. Attention stays within a segment.
        positions: The place of each token within its document.
    """

    tokens: Int32[np.ndarray, "A B S"]
    targets: Int32[np.ndarray, "A B S"]
    segment_ids: Int32[np.ndarray, "A B S"]
    positions: Int32[np.ndarray, "A B S"]


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
        epoch, index = divmod(step, self.steps_per_epoch)
        per_batch = self.batch_size * self.accumulation_steps
        chosen = _order(len(self.rows), (self.seed, epoch) if self.shuffle else None)[
            index * per_batch : (index + 1) * per_batch
        ]
        # -1 is no row: padding.
        chosen = np.pad(chosen, (0, per_batch - len(chosen)), constant_values=-1)
        rows: Rows = self.rows.rows(chosen)
        shape = (self.accumulation_steps, self.batch_size, self.rows.row_length)
        return Batch(*(array.reshape(shape) for array in rows))

    def from_step(self, start: int = 0, stop: int | None = None) -> Iterator[Batch]:
        """The batches of successive steps.

        Args:
            start: The first step.
            stop: The step to stop before; None: never.

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


@functools.lru_cache(maxsize=2)
def _order(num_rows: int, seed: tuple[int, int] | None) -> np.ndarray:
    """The order of an epoch; remembered, because every step of the epoch asks for it."""
    return np.arange(num_rows) if seed is None else np.random.default_rng(seed).permutation(num_rows)
