"""A row of a batch as text: its documents with their targets and special tokens.

The text is decoded from the arrays of the train step, not from the examples: the preview shows the actual training
data. A document's last target is no input (nothing follows it), but is shown, because it is learnt.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int32

from fastjax.data.batches import BatchSource
from fastjax.data.documents import IGNORE
from fastjax.data.preferences import Role

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Piece(NamedTuple):
    """Successive tokens of one kind.

    Attributes:
        text: their text.
        learnt: whether they are targets.
        special: whether it is a special token.
    """

    text: str
    learnt: bool
    special: bool


class DocumentView(NamedTuple):
    """A document within a row.

    Attributes:
        pieces: its text.
        tokens: its input tokens.
        targets: its targets.
        role: what it is to a loss of preferences, in a word; "": there is no such.
    """

    pieces: list[Piece]
    tokens: int
    targets: int
    role: str = ""


class FirstRow(NamedTuple):
    """A row of one of the first batches.

    Attributes:
        step: the step that trains on it, from 1.
        place: its place among the step's rows, as "2 of 8".
        origin: the places of its examples, for people.
        slots: room for tokens in the row.
        documents: its documents.
    """

    step: int
    place: str
    origin: str
    slots: int
    documents: list[DocumentView]


def first_rows(batches: BatchSource, count: int, tokenizer: "PreTrainedTokenizerFast") -> Iterator[FirstRow]:
    """The first rows of a run, without rows of padding.

    Args:
        batches: its batches.
        count: rows at most; no more than an epoch has.
        tokenizer: decodes the tokens.

    Yields:
        The rows, in the order of the steps.
    """
    yielded = 0
    for step, batch in enumerate(batches.from_step(0, batches.steps_per_epoch)):
        numbers = batches.row_numbers(step).ravel()
        rows = [array.reshape(len(numbers), -1) for array in (batch.tokens, batch.targets, batch.segment_ids)]
        roles = batch.extra["roles"].reshape(len(numbers), -1) if "roles" in batch.extra else [None] * len(numbers)
        for place in np.flatnonzero(numbers >= 0).tolist():
            if yielded == count:
                return
            origin = batches.describe_rows(numbers[place : place + 1])
            tokens, targets, segment_ids = (array[place] for array in rows)
            documents = view_row(tokens, targets, segment_ids, tokenizer, roles[place])
            yield FirstRow(step + 1, f"{place + 1} of {len(numbers)}", origin, len(tokens), documents)
            yielded += 1


def view_row(
    tokens: Int32[np.ndarray, " S"],
    targets: Int32[np.ndarray, " S"],
    segment_ids: Int32[np.ndarray, " S"],
    tokenizer: "PreTrainedTokenizerFast",
    roles: Int32[np.ndarray, " D"] | None = None,
) -> list[DocumentView]:
    """Decode the documents of a row.

    Args:
        tokens: a row of `Batch.tokens`.
        targets: its targets.
        segment_ids: its segment ids.
        tokenizer: decodes the tokens.
        roles: of its documents, to a loss of preferences; None: there is no such.
    """
    special = np.array(sorted(_special_tokens(tokenizer)), np.int64)
    views = []
    for segment in range(1, int(segment_ids.max(initial=0)) + 1):
        here = segment_ids == segment
        inputs, learnt = tokens[here], targets[here] != IGNORE
        ids = np.append(inputs, targets[here][-1:]) if learnt[-1] else inputs
        mask = np.insert(learnt, 0, False)[: len(ids)]
        pieces = list(_pieces(ids, mask, np.isin(ids, special), tokenizer))
        role = "" if roles is None else Role(int(roles[segment - 1])).name.lower()
        views.append(DocumentView(pieces, len(inputs), int(np.count_nonzero(learnt)), role))
    return views


def _special_tokens(tokenizer: "PreTrainedTokenizerFast") -> set[int]:
    return {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}


def _pieces(
    ids: Int[np.ndarray, " N"],
    learnt: Bool[np.ndarray, " N"],
    special: Bool[np.ndarray, " N"],
    tokenizer: "PreTrainedTokenizerFast",
) -> Iterator[Piece]:
    """Tokens in groups, each with the text that it adds to the groups before it.

    A group is not decoded alone: decoders treat the beginning of a text specially, and a character's bytes may lie in
    two groups; then it belongs to the second.
    """
    end, before = 0, ""
    for (is_learnt, is_special, _), group in groupby(
        range(len(ids)), key=lambda n: (bool(learnt[n]), bool(special[n]), int(special[:n].sum()) if special[n] else -1)
    ):
        end += len(list(group))
        text = str(tokenizer.decode(ids[:end].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False))
        if end < len(ids):
            text = text.rstrip("\N{REPLACEMENT CHARACTER}")
        yield Piece(text[len(before) :], is_learnt, is_special)
        before = text
