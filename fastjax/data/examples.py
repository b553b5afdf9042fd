"""Examples as tokens, many in flat arrays: as small as the tokens, and quick to cut and to join."""

import dataclasses
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int32, Int64


class Example(NamedTuple):
    """One example as tokens.

    Attributes:
        tokens: The token ids.
        learn: True for the tokens that the model learns to predict; False for the first, which nothing predicts.
    """

    tokens: Int32[np.ndarray, " N"]
    learn: Bool[np.ndarray, " N"]


@dataclasses.dataclass(frozen=True)
class Examples:
    """Examples one behind the other; example e is [offsets[e], offsets[e + 1]) of `tokens` and `learn`.

    Attributes:
        tokens: Token ids.
        learn: Which of them the model learns to predict.
        offsets: Where each example starts, and the total at the end.
        special: The examples whose content holds special tokens, by index, ascending.
    """

    tokens: Int32[np.ndarray, " N"]
    learn: Bool[np.ndarray, " N"]
    offsets: Int64[np.ndarray, " E_plus_1"]
    special: Int64[np.ndarray, " _"] = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(index)
        span = slice(*self.offsets[index : index + 2])
        return Example(self.tokens[span], self.learn[span])
