"""The examples of a data set as tokens, and as documents, in flat arrays.

A document is an example as the model sees it: input tokens, and for each the token to predict. Tokens behind the last
target (a user's last word, the newline after an end of turn, the end of turn itself as an input) change no loss and are
cut off. Flat arrays are as small as the tokens, quick to build, and can be written to a file as they are.

A row has inputs for max_length tokens, and the last one's target is the token behind it, which is no input: an example
of max_length + 1 tokens is whole. (TRL counts that token too; its max_length is one more for the same targets.)

An example longer than a row becomes one document, of its beginning (truncate), none (drop), or several (split): its
successive pieces of a row's length. Each piece is a separate document: its positions begin at 0, it has no BOS and no
attention to the pieces before it. A piece without a target is left out.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int32, Int64

from fastjax.data.settings import TooLong

IGNORE = -100
"""The target of a token whose successor is not learnt."""


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


class Counts(NamedTuple):
    """Examples by their fate.

    Attributes:
        examples: All.
        truncated: Longer than a row: lost targets.
        split: Longer than a row: became several documents.
        dropped: Longer than a row: left out.
        no_targets: Left out for lack of a target.
        apart: Documents more than examples, since a template rewrites the past: one an answer.
        elsewhere: Answers that follow on another text than generation's.
    """

    examples: int = 0
    truncated: int = 0
    split: int = 0
    dropped: int = 0
    no_targets: int = 0
    apart: int = 0
    elsewhere: int = 0


class Documents(NamedTuple):
    """Documents one behind the other; document d is [offsets[d], offsets[d + 1]) of `tokens` and `targets`.

    Attributes:
        tokens: Input token ids.
        targets: The token that follows each, or -100.
        offsets: The start of each document, and the total at the end.
        examples: Each document's example, by index, ascending.
        counts: Counts of all examples.
    """

    tokens: Int32[np.ndarray, " N"]
    targets: Int32[np.ndarray, " N"]
    offsets: Int64[np.ndarray, " D_plus_1"]
    examples: Int64[np.ndarray, " D"]
    counts: Counts

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Int64[np.ndarray, " D"]:
        """Tokens of each document."""
        return np.diff(self.offsets)

    @classmethod
    def of(
        cls, examples: Examples, max_length: int, too_long: TooLong = "truncate", *, last_token: bool = False
    ) -> "Documents":
        """Convert examples to documents of at most `max_length` tokens.

        Args:
            examples: The examples.
            max_length: Tokens in a document, at most.
            too_long: The treatment of longer examples.
            last_token: Whether an example's last learnt token is an input too, of which nothing is learnt; none of the
                examples is longer then.

        Returns:
            The documents, in order.
        """
        learnt = np.flatnonzero(examples.learn)
        example = np.repeat(np.arange(len(examples)), np.diff(examples.offsets))[learnt]
        # The token at place p of an example is learnt by the model's answer to the one at p - 1, which lies in this
        # piece of max_length tokens, and is the piece's token number:
        piece, last = np.divmod(learnt - examples.offsets[example] - 1, max_length)
        longer = np.unique(example[piece > 0])
        kept = np.ones(len(learnt), bool)
        if too_long == "truncate":
            kept = piece == 0
        elif too_long == "drop":
            kept = ~np.isin(example, longer)
        example, piece, last = example[kept], piece[kept], last[kept]
        # A document ends at its last learnt token: the last before example or piece changes.
        ends = np.flatnonzero((np.diff(example, append=-1) != 0) | (np.diff(piece, append=-1) != 0))
        example, lengths = example[ends], last[ends] + 1 + last_token
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        starts = examples.offsets[example] + piece[ends] * max_length
        taken = spans(starts, lengths)
        following = np.minimum(taken + 1, len(examples.tokens) - 1) if last_token else taken + 1
        targets = np.where(examples.learn[following], examples.tokens[following], np.int32(IGNORE))
        if last_token:
            targets[offsets[1:] - 1] = IGNORE
        truncated = int(np.isin(longer, example).sum()) if too_long == "truncate" else 0
        found, dropped = np.unique(examples.records[example]), np.zeros(0, np.int64)
        if too_long == "drop":
            dropped = np.setdiff1d(examples.records[longer], found)
        counts = Counts(
            examples=examples.count,
            truncated=truncated,
            split=len(longer) if too_long == "split" else 0,
            dropped=len(dropped),
            no_targets=examples.count - len(dropped) - len(found),
            apart=len(examples) - examples.count,
            elsewhere=examples.elsewhere,
        )
        return cls(examples.tokens[taken], targets, offsets, examples.records[example], counts)

    @classmethod
    def concatenate(cls, parts: Sequence["Documents"]) -> "Documents":
        """Concatenate documents.

        Args:
            parts: Documents of successive examples.
        """
        before = np.cumsum([0, *(part.counts.examples for part in parts)])
        lengths = [part.lengths for part in parts]
        return cls(
            tokens=np.concatenate([*(part.tokens for part in parts), np.zeros(0, np.int32)]),
            targets=np.concatenate([*(part.targets for part in parts), np.zeros(0, np.int32)]),
            offsets=np.concatenate([np.zeros(1, np.int64), *lengths]).cumsum(),
            examples=np.concatenate(
                [*(part.examples + n for part, n in zip(parts, before, strict=False)), np.zeros(0, np.int64)]
            ),
            counts=Counts(*map(sum, zip(Counts(), *(part.counts for part in parts), strict=True))),
        )


def spans(starts: Int64[np.ndarray, " D"], lengths: Int64[np.ndarray, " D"]) -> Int64[np.ndarray, " N"]:
    """The indices of spans, one span behind the other.

    Args:
        starts: The first index of each.
        lengths: The number of its indices.
    """
    behind = np.cumsum(lengths)
    return np.arange(lengths.sum()) + np.repeat(starts - (behind - lengths), lengths)
