"""The order of an epoch in which the rows of a batch are of similar length, so that little of it is padding.

An epoch's random order is cut into pools of `POOL` batches, each sorted by length, and the batches of all pools are
shuffled.
"""

from typing import Any

import numpy as np
from jaxtyping import Int, Int64

#: Batches whose rows are sorted together.
POOL = 50


class ByLength:
    """The order of an epoch's rows: a function of the seed, the epoch and their lengths."""

    def __init__(self, lengths: Int[np.ndarray, " R"]):
        """Take the rows' lengths.

        Args:
            lengths: tokens of each row.
        """
        self._lengths = lengths
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

    def _ordered(self, size: int, random: np.random.Generator) -> Int64[np.ndarray, " R"]:
        order = random.permutation(len(self._lengths))
        whole = len(order) // size * size
        pools = [order[start : min(start + POOL * size, whole)] for start in range(0, whole, POOL * size)]
        pools = [pool[np.argsort(self._lengths[pool], kind="stable")] for pool in pools]
        batches = np.concatenate([*pools, order[:0]]).reshape(-1, size)
        return np.concatenate([random.permutation(batches).ravel(), order[whole:]])
