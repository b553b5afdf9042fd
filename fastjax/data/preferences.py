"""Documents of preferences in packed rows: pairs of answers, or answers that are marked one by one.

A row's documents have roles, by their segment. A pair is a chosen document and, right behind it, the rejected one: both
are packed as one, so they share a row, and with it a microbatch and a device. KTO's examples stand alone; its estimate
of the divergence takes mismatched documents, a prompt with the completion of another one.
"""

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int, Int32, Shaped

from fastjax.data.batches import Batch, stack
from fastjax.data.documents import IGNORE, Counts, Documents
from fastjax.data.packing import PackedRows, best_fit


class Role(enum.IntEnum):
    """What a document is to a loss of preferences.

    Attributes:
        NONE: nothing, or there is no such document.
        CHOSEN: the better answer of a pair, or a desirable one.
        REJECTED: the worse answer of a pair, or an undesirable one.
        MISMATCHED: a completion of another prompt, for KTO's estimate of the divergence.
    """

    NONE = 0
    CHOSEN = 1
    REJECTED = 2
    MISMATCHED = 3


class Answer(NamedTuple):
    """A prompt's completion.

    Attributes:
        prompt: token ids; at least one.
        completion: those that are scored; at least one.
        role: of the document.
    """

    prompt: Sequence[int]
    completion: Sequence[int]
    role: Role


@dataclasses.dataclass(frozen=True)
class PreferenceRows:
    """Packed answers.

    Attributes:
        packed: rows of the answers as documents.
        roles: of each document.
        slots: documents that a row holds at most.
        reference_log_probs: of each document under the reference; None: they are not known.
    """

    packed: PackedRows
    roles: Int32[np.ndarray, " D"]
    slots: int
    reference_log_probs: Float32[np.ndarray, " D"] | None = None

    def __len__(self) -> int:
        return len(self.packed)

    def batch(self, numbers: Int[np.ndarray, "A B"]) -> Batch:
        """A batch whose extra fields say what the documents of each row are.

        Args:
            numbers: of its rows; one outside [0, len(self)) is a row of padding.

        Returns:
            The batch, with `roles`, int32 [A, B, slots], and if it is known `reference_log_probs`, float32 [A, B,
            slots]: at place d that of the document of segment d + 1.
        """
        rows = [self.packed.members(int(number)) for number in numbers.ravel()]

        def by_slot(values: np.ndarray) -> np.ndarray:
            found = np.zeros((len(rows), self.slots), values.dtype)
            for row, members in enumerate(rows):
                found[row, : len(members)] = values[members]
            return found.reshape(*numbers.shape, self.slots)

        extra: Mapping[str, Shaped[np.ndarray, "A B ..."]] = {"roles": by_slot(self.roles)}
        if self.reference_log_probs is not None:
            extra = {**extra, "reference_log_probs": by_slot(self.reference_log_probs)}
        return stack(self.packed.rows(numbers.ravel()), numbers.shape)._replace(extra=extra)

    def with_reference(self, log_probs: Float32[np.ndarray, "R slots"]) -> "PreferenceRows":
        """The same rows with the log-probabilities of their documents under the reference.

        Args:
            log_probs: row after row, in the places of `batch`.
        """
        found = np.zeros(len(self.roles), np.float32)
        for row in range(len(self)):
            members = self.packed.members(row)
            found[members] = log_probs[row, : len(members)]
        return dataclasses.replace(self, reference_log_probs=found)


def pack_preferences(groups: Sequence[Sequence[Answer]], row_length: int) -> PreferenceRows:
    """Pack groups of answers, none of which is cut or divided over rows.

    Args:
        groups: a pair (the chosen answer, the rejected one), or answers that stand alone, together with mismatched
            ones or not.
        row_length: tokens in a row.

    Raises:
        ValueError: no groups, an answer without a prompt or completion, or a group longer than a row.
    """
    if not groups:
        raise ValueError("groups: expected at least one, got none")
    answers = [answer for group in groups for answer in group]
    for number, answer in enumerate(answers):
        if not len(answer.prompt) or not len(answer.completion):
            raise ValueError(
                f"answer {number}: expected at least one token of the prompt and one of the completion, "
                f"got {len(answer.prompt)} and {len(answer.completion)}"
            )
    lengths = [len(answer.prompt) + len(answer.completion) - 1 for answer in answers]
    starts = np.cumsum([0, *map(len, groups)])
    sizes = [sum(lengths[start:end]) for start, end in zip(starts[:-1], starts[1:], strict=True)]
    for number, size in enumerate(sizes):
        if not 0 < size <= row_length:
            raise ValueError(f"group {number}: expected 1 to {row_length} tokens, as a row has, got {size}")
    bins = best_fit(sizes, row_length)
    members = [[one for group in row for one in range(starts[group], starts[group + 1])] for row in bins]
    documents = Documents(
        np.concatenate([[*a.prompt, *a.completion][:-1] for a in answers]).astype(np.int32),
        np.concatenate([[IGNORE] * (len(a.prompt) - 1) + list(a.completion) for a in answers]).astype(np.int32),
        np.cumsum([0, *lengths], dtype=np.int64),
        np.arange(len(answers), dtype=np.int64),
        Counts(len(answers)),
    )
    order = np.asarray([one for row in members for one in row], np.int64)
    packed = PackedRows(documents, order, np.cumsum([0, *map(len, members)], dtype=np.int64), row_length)
    return PreferenceRows(packed, np.asarray([a.role for a in answers], np.int32), max(map(len, members)))
