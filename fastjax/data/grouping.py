"""Batches of rows of similar length, cut to the longest of them.

Rows of one document each are padded to the length of a row, and a step computes the padding too. Here an epoch's
random order is cut into pools of `POOL` batches, each sorted by length, and the batches of all pools are shuffled; a
batch is as long as its longest row, rounded up to an eighth of a row, so that a run compiles eight programs at most.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Int64

from fastjax.data.batches import Batch, Batches, part_of, stack, successive
from fastjax.data.packing import Rows

#: Batches whose rows are sorted together.
POOL = 50
#: Lengths of batches in one run, at most.
LENGTHS = 8
#: Of which lengths are multiples, for kernels that compute so many tokens at once.
TILE = 128


class _Epoch(NamedTuple):
    number: int
    order: Int64[np.ndarray, " R"]


class GroupedBatches:
    """The batches of a run; a function of the seed and the step alone, as of `Batches`."""

    def __init__(self, batches: Batches):
        """Take the rows.

        Args:
            batches: of the same rows, in one order of all of them; each row of one document.
        """
        self.rows, self._batches = batches.rows, batches
        self._lengths = self.rows.documents.lengths[self.rows.order]
        length = self.rows.row_length
        self._unit = min(length, -(-length // (LENGTHS * TILE)) * TILE)
        self._epoch: _Epoch | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch, the last one padded."""
        return self._batches.steps_per_epoch

    def row_numbers(self, step: int) -> Int64[np.ndarray, "A B"]:
        """The row numbers of a step's batch.

        Args:
            step: The step of the run, from 0.

        Returns:
            Indices into `rows`; -1: a row of padding.
        """
        number, index = divmod(step, self.steps_per_epoch)
        epoch = self._epoch
        if epoch is None or epoch.number != number:
            epoch = self._epoch = _Epoch(number, self._order(number))
        return part_of(epoch.order, index, (self._batches.accumulation_steps, self._batches.batch_size))

    def batch(self, step: int) -> Batch:
        """The batch of a step, of the length of its longest row in units.

        Args:
            step: The step of the run, from 0.
        """
        numbers = self.row_numbers(step)
        longest = int(self._lengths[numbers[numbers >= 0]].max())
        length = min(self.rows.row_length, -(-longest // self._unit) * self._unit)
        return stack(Rows(*(array[:, :length] for array in self.rows.rows(numbers.ravel()))), numbers.shape)

    def describe_rows(self, rows: Int[np.ndarray, " _"]) -> str:
        """Row numbers and the places of their examples, for people."""
        return self._batches.describe_rows(rows)

    def position(self, step: int) -> dict[str, Any]:
        """The state of a checkpoint after `step` steps: empty, since the step is enough."""
        return self._batches.position(step)

    def from_step(
        self, start: int = 0, stop: int | None = None, position: Mapping[str, Any] | None = None
    ) -> Iterator[Batch]:
        """The batches of successive steps.

        Args:
            start: The first step.
            stop: The step to stop before; None: never.
            position: Unused.
        """
        return successive(self.batch, start, stop)

    def _order(self, epoch: int) -> Int64[np.ndarray, " R"]:
        """The rows of an epoch: whole batches in a random order, and what fills no batch behind them."""
        random = np.random.default_rng((self._batches.seed, epoch))
        order = random.permutation(len(self.rows))
        size = self._batches.batch_size * self._batches.accumulation_steps
        whole = len(order) // size * size
        pools = [order[start : min(start + POOL * size, whole)] for start in range(0, whole, POOL * size)]
        pools = [pool[np.argsort(self._lengths[pool], kind="stable")] for pool in pools]
        batches = np.concatenate([*pools, order[:0]]).reshape(-1, size)
        return np.concatenate([random.permutation(batches).ravel(), order[whole:]])
