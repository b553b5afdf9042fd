"""All examples of a data set in flat arrays.

A document is an example as the model will see it: the tokens that go in, and for each the token to predict. Tokens
behind the last one that is learnt (a user's last word, the newline after an end of turn, the end of turn itself as an
input) change no loss and are not kept. Flat arrays are as small as the tokens, quick to build, and can be
written to a file as they are.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, Int64

from fastjax.data.encoding import Example

IGNORE = -100
"""The target of a token after which nothing is learnt."""


class Documents(NamedTuple):
    """Documents one behind the other; document d is [offsets[d], offsets[d + 1]) of `tokens` and `targets`.

    Attributes:
        tokens: Token ids that go into the model.
        targets: For each the token to predict, the one that follows it in the text, or -100.
        offsets: Where each document starts, and the total at the end.
        truncated: Documents that lost tokens to learn because they were too long.
        no_targets: Examples that are no documents, because nothing in them is learnt.
    """

    tokens: Int32[np.ndarray, " N"]
    targets: Int32[np.ndarray, " N"]
    offsets: Int64[np.ndarray, " D_plus_1"]
    truncated: int
    no_targets: int

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Int64[np.ndarray, " D"]:
        """The number of tokens of each document."""
        return np.diff(self.offsets)

    @classmethod
    def from_examples(cls, examples: Iterable[Example], max_length: int) -> "Documents":
        """Lay examples down as documents of at most `max_length` tokens.

        Args:
            examples: The examples.
            max_length: The most tokens of a document. Of a longer example the beginning is kept; its end is then
                not learnt.

        Returns:
            The documents, in order.
        """
        tokens, targets, lengths = [], [], []
        truncated = no_targets = 0
        for example in examples:
            learnt = np.flatnonzero(example.learn)
            # Token n is learnt by the model's answer to token n - 1: max_length tokens in learn one token more.
            kept = learnt[learnt <= max_length]
            if kept.size == 0:
                no_targets += 1
                continue
            truncated += int(kept.size < learnt.size)
            length = int(kept[-1])
            tokens.append(example.tokens[:length])
            following = slice(1, length + 1)
            targets.append(np.where(example.learn[following], example.tokens[following], np.int32(IGNORE)))
            lengths.append(length)
        return cls(
            tokens=np.concatenate([*tokens, np.zeros(0, np.int32)]),
            targets=np.concatenate([*targets, np.zeros(0, np.int32)]),
            offsets=np.cumsum([0, *lengths], dtype=np.int64),
            truncated=truncated,
            no_targets=no_targets,
        )
