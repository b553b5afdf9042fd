"""Examples as tokens in flat arrays, which are small and quick to cut and join."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int32, Int64


class Example(NamedTuple):
    """One example as tokens.

    Attributes:
        tokens: The token ids.
        learn: Whether each token is a target; False for the first, which has no predecessor.
    """

    tokens: Int32[np.ndarray, " N"]
    learn: Bool[np.ndarray, " N"]


@dataclasses.dataclass(frozen=True)
class Examples:
    """Examples one behind the other; example e is [offsets[e], offsets[e + 1]) of `tokens` and `learn`.

    Attributes:
        tokens: Token ids.
        learn: Whether each is a target.
        offsets: The start of each example, and the total at the end.
        noted: Kind (`fastjax.data.notes`) → indices of the records that people should know of, ascending.
        records: The record of each example, ascending: a conversation may become several examples.
        elsewhere: Number of answers that follow on another text than generation's.
    """

    tokens: Int32[np.ndarray, " N"]
    learn: Bool[np.ndarray, " N"]
    offsets: Int64[np.ndarray, " E_plus_1"]
    noted: Mapping[str, Sequence[int]]
    records: Int64[np.ndarray, " E"]
    elsewhere: int = 0

    @classmethod
    def of(cls, listed: Sequence[Example]) -> "Examples":
        """Examples one behind the other, each of a record of its own.

        Args:
            listed: At least one.
        """
        tokens, learn = (np.concatenate(arrays) for arrays in zip(*listed, strict=True))
        offsets = np.cumsum([0, *(len(one.tokens) for one in listed)], dtype=np.int64)
        return cls(tokens, learn, offsets, {}, np.arange(len(listed)))

    @property
    def count(self) -> int:
        """Number of records."""
        return int(self.records[-1]) + 1 if len(self.records) else 0

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(index)
        span = slice(*self.offsets[index : index + 2])
        return Example(self.tokens[span], self.learn[span])
