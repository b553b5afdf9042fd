"""Documents of preferences in packed rows: pairs of answers, or answers that are marked one by one.

A row's documents have roles, by their segment. A pair is a chosen document and, right behind it, the rejected one: both
are packed as one, so they share a row, and with it a microbatch and a device. KTO's examples stand alone; its estimate
of the divergence takes mismatched documents, a prompt with the completion of another one.
"""

import enum
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int

from fastjax.data.documents import Counts, Documents, Example, Examples
from fastjax.data.packing import PackedRows, pack_documents


class Role(enum.IntEnum):
    """The part that a document has in a loss of preferences.

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


def pack_preferences(groups: Sequence[Sequence[Answer]], row_length: int, *, last_token: bool = False) -> PackedRows:
    """Pack groups of answers, none of which is cut or divided over rows.

    Args:
        groups: a pair (the chosen answer, the rejected one), or answers that stand alone, together with mismatched
            ones or not.
        row_length: tokens in a row.
        last_token: whether the last token of each answer is an input too, where `RewardLoss` reads its score.

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
    encoded = [
        Example(
            np.asarray([*a.prompt, *a.completion], np.int32),
            np.repeat([False, True], [len(a.prompt), len(a.completion)]),
        )
        for a in answers
    ]
    documents = documents_of(encoded, np.arange(len(answers)), Counts(len(answers)), last_token=last_token)
    starts = np.cumsum([0, *map(len, groups)])
    for number, (start, end) in enumerate(itertools.pairwise(starts.tolist())):
        size = int(documents.lengths[start:end].sum())
        if not 0 < size <= row_length:
            raise ValueError(f"group {number}: expected 1 to {row_length} tokens, as a row has, got {size}")
    roles = np.asarray([answer.role for answer in answers], np.int32)
    return pack_documents(documents, row_length, starts=starts, fields={"roles": roles})


def documents_of(
    answers: Sequence[Example], examples: Int[np.ndarray, " D"], counts: Counts, *, last_token: bool = False
) -> Documents:
    """Answers as documents, each from its first token to the last that is scored.

    Args:
        answers: each with its prompt, and with at least one token that is scored.
        examples: each one's example, by index.
        counts: of the examples.
        last_token: whether the last token that is scored is an input too, which nothing follows, and not a target
            alone.
    """
    joined = Examples.of(answers)
    flat = Documents.of(joined, len(joined.tokens), last_token=last_token)
    return Documents(flat.tokens, flat.targets, flat.offsets, np.asarray(examples, np.int64), counts)


def with_reference(rows: PackedRows, log_probs: Float32[np.ndarray, "R D"]) -> PackedRows:
    """Rows with the log-probabilities of their documents under the reference.

    Args:
        rows: of `pack_preferences`.
        log_probs: row after row, in the places of `batch_of`.
    """
    reference = np.zeros(len(rows.documents), np.float32)
    for row in range(len(rows)):
        members = rows.members(row)
        reference[members] = log_probs[row, : len(members)]
    fields = {**rows.fields, "reference_log_probs": reference}
    return PackedRows(rows.documents, rows.order, rows.offsets, rows.row_length, rows.origins, fields)
