"""Batches of rows of similar length, cut to the longest of them.

Rows of one document each are padded to the length of a row, and a step computes the padding too. Here an epoch's
random order is cut into pools of `POOL` batches, each sorted by length, and the batches of all pools are shuffled; a
batch is as long as its longest row, rounded up to an eighth of a row, so that a run compiles eight programs at most.
"""

from typing import Any

import numpy as np
from jaxtyping import Int64

from fastjax.data.packing import PackedRows

#: Batches whose rows are sorted together.
POOL = 50
#: Lengths of batches in one run, at most.
LENGTHS = 8
#: The divisor of lengths, for kernels that compute so many tokens at once.
TILE = 128


class ByLength:
    """The order of an epoch's rows, and the length of a batch; functions of the seed, the epoch and the rows."""

    def __init__(self, rows: PackedRows):
        """Take the rows.

        Args:
            rows: of one document each.
        """
        self._lengths = rows.documents.lengths[rows.order]
        self._row_length = rows.row_length
        self._unit = min(rows.row_length, -(-rows.row_length // (LENGTHS * TILE)) * TILE)
        self._known: tuple[Any, Int64[np.ndarray, " R"]] | None = None

    def order(self, size: int, seed: tuple[int, int]) -> Int64[np.ndarray, " R"]:
        """The rows of an epoch: whole batches in a random order, and what fills no batch behind them.

        Args:
            size: rows of a batch.
            seed: the run's, and the epoch.
        """
        if self._known is None or self._known[0] != (size, seed):
            self._known = (size, seed), self._ordered(size, np.random.default_rng(seed))
        return self._known[1]

    def length(self, numbers: Int64[np.ndarray, "A B"]) -> int:
        """Tokens of a batch: of its longest row, in units.

        Args:
            numbers: of its rows; -1: a row of padding.
        """
        longest = int(self._lengths[numbers[numbers >= 0]].max())
        return min(self._row_length, -(-longest // self._unit) * self._unit)

    def _ordered(self, size: int, random: np.random.Generator) -> Int64[np.ndarray, " R"]:
        order = random.permutation(len(self._lengths))
        whole = len(order) // size * size
        pools = [order[start : min(start + POOL * size, whole)] for start in range(0, whole, POOL * size)]
        pools = [pool[np.argsort(self._lengths[pool], kind="stable")] for pool in pools]
        batches = np.concatenate([*pools, order[:0]]).reshape(-1, size)
        return np.concatenate([random.permutation(batches).ravel(), order[whole:]])
