"""Answers of preferences to groups of documents.

Pairs, or single answers each with its mismatched document (the prompt with the completion of the example before, as
TRL's rotation, over the whole data set), are groups that share a row. What a group has over a row is cut from the ends
of its longest documents, or the group is left out.
"""

import collections
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool

from fastjax.data import notes
from fastjax.data.documents import Counts, Example
from fastjax.data.encoded import Encoded, Say, told
from fastjax.data.encoding import Encoder
from fastjax.data.preferences import Role, documents_of
from fastjax.data.records import PreferenceRecord
from fastjax.data.settings import Pairing, TooLong
from fastjax.errors import ConfigError, DataError


class Group(NamedTuple):
    """Documents that share a row.

    Attributes:
        example: The index of their record.
        documents: Their tokens.
        roles: The role of each document.
        margin: The margin of a pair.
    """

    example: int
    documents: list[Example]
    roles: list[Role]
    margin: float = 0.0


def encode_preferences(
    records: Sequence[PreferenceRecord],
    encoder: Encoder,
    max_seq_length: int,
    where: str,
    progress: Say | None,
    pairing: Pairing,
    max_length: int | None = None,
    max_prompt_length: int | None = None,
    max_completion_length: int | None = None,
) -> Encoded:
    """Encode the answers of preferences as groups of documents that fit a row.

    Args:
        records: The examples.
        encoder: The encoder of their texts; its options' `loss_on` is "responses" or "last_response". By their
            `too_long` a group longer than a row, or an answer longer than `max_length`, is cut ("truncate") or left out
            ("drop").
        max_seq_length: Tokens in a row.
        where: The data set's name in errors.
        progress: Takes messages for people.
        pairing: Pairs, single answers with mismatched ones, or ranked pairs, whose rows have a field `margins`.
        max_length: Tokens of an answer with its prompt, at most; None: what a row has.
        max_prompt_length: Tokens of a prompt, of which the end is kept; None: as many as there are.
        max_completion_length: Tokens of an answer, of which the beginning is kept; None: as many as there are.

    Raises:
        ConfigError: A tokenizer without a chat template that is needed; a wrong option.
        DataError: No group with anything to learn.
    """
    for name, known in (("loss_on", ("responses", "last_response")), ("too_long", ("truncate", "drop"))):
        if (value := getattr(encoder.options, name)) not in known:
            raise ConfigError(f"data.{name}: expected {' or '.join(known)} with preferences.loss, got {value}")
    answers, noted = _encoded(encoder, records, where, progress)
    answers = [[_cut(one, max_prompt_length, max_completion_length) for one in listed] for listed in answers]
    single, ranked = pairing == "unpaired", pairing == "ranked"
    groups = _single(records, answers, where) if single else _pairs(records, answers)
    fitted = [_fitted(group, max_seq_length, max_length, encoder.options.too_long, ranked) for group in groups]
    fates = collections.Counter(fate for fate, _ in fitted)
    groups = [group for _, group in fitted if group is not None]
    if not groups:
        raise DataError(
            f"{where}: none of the {len(records):,} examples has answers to learn from within {max_seq_length:,} "
            f"tokens, which the documents of a {'answer' if single else 'pair'} share: "
            f"{fates['no_targets']:,} have nothing left to score, {fates['dropped']:,} are longer and dropped"
        )
    same = {group.example for group in groups if _same(group, answers[group.example])}
    notes.add(noted, {notes.IDENTICAL: sorted(same)}, records)
    counts = Counts(len(records), fates["truncated"], 0, fates["dropped"], fates["no_targets"])
    sizes = [len(group.documents) for group in groups]
    examples = np.repeat([group.example for group in groups], sizes)
    flat = [document for group in groups for document in group.documents]
    fields: dict[str, Any] = {"roles": np.asarray([role for group in groups for role in group.roles], np.int32)}
    if ranked:
        fields["margins"] = np.repeat([group.margin for group in groups], sizes).astype(np.float32)
    documents = documents_of(flat, examples, counts, last_token=ranked)
    return Encoded(documents, noted, np.cumsum([0, *sizes]), fields, labelled=single)


def _encoded(
    encoder: Encoder, records: Sequence[PreferenceRecord], where: str, progress: Say | None
) -> tuple[list[list[Example]], notes.Notes]:
    """The answers of each record as tokens, and the records that people should know of."""
    owners = [index for index, record in enumerate(records) for _ in record.answers]
    encoded: list[list[Example]] = [[] for _ in records]
    noted: dict[str, dict[int, None]] = {}
    answers = (answer for record in records for answer in record.answers)
    chunks = encoder.encode(answers, apart=False)
    for done, examples in told(chunks, len(owners), "answers", where, progress):
        for kind, numbers in examples.noted.items():
            noted.setdefault(kind, {}).update(dict.fromkeys(owners[done + index] for index in numbers))
        for index in range(len(examples)):
            encoded[owners[done + index]].append(examples[index])
    counted: notes.Notes = {}
    notes.add(counted, {kind: list(rows) for kind, rows in noted.items()}, records)
    return encoded, counted


def _cut(example: Example, prompt: int | None, completion: int | None) -> Example:
    """An answer with so many tokens of its prompt's end and of its own beginning."""
    begins = int(np.argmax(example.learn))
    first = 0 if prompt is None else max(0, begins - prompt)
    behind = None if completion is None else begins + completion
    return Example(example.tokens[first:behind], example.learn[first:behind])


def _pairs(records: Sequence[PreferenceRecord], encoded: Sequence[list[Example]]) -> list[Group]:
    roles = [Role.CHOSEN, Role.REJECTED]
    return [Group(index, encoded[index], roles, record.margin) for index, record in enumerate(records)]


def _single(records: Sequence[PreferenceRecord], encoded: Sequence[list[Example]], where: str) -> list[Group]:
    """Each answer with its mismatched document."""
    listed = [
        (index, answer, Role.CHOSEN if desirable else Role.REJECTED)
        for index, (record, answers) in enumerate(zip(records, encoded, strict=True))
        for answer, desirable in zip(answers, record.desirable, strict=True)
    ]
    whole = [one for one in listed if one[1].learn.any()]
    if len(whole) < 2:
        raise DataError(
            f"{where}: expected at least two answers, since each prompt also takes the completion of another one, got "
            f"{len(whole)}"
        )
    before = {id(one[1]): other[1] for one, other in zip(whole, [whole[-1], *whole[:-1]], strict=True)}
    groups = []
    for index, answer, role in listed:
        documents = [answer, _mismatched(answer, before[id(answer)])] if id(answer) in before else [answer]
        groups.append(Group(index, documents, [role, Role.MISMATCHED][: len(documents)]))
    return groups


def _same(group: Group, answers: Sequence[Example]) -> bool:
    """Whether the two answers of a pair are the same tokens as they fit; of single ones the chosen stands for both."""
    single = Role.MISMATCHED in group.roles or len(group.roles) == 1
    pair = (answers if group.roles[0] == Role.CHOSEN else ()) if single else group.documents
    return len(pair) == 2 and np.array_equal(pair[0].tokens, pair[1].tokens)


def _mismatched(example: Example, other: Example) -> Example:
    """The prompt of one example with the completion of another."""
    prompt, start = int(np.argmax(example.learn)), int(np.argmax(other.learn))
    arrays = zip(example, other, strict=True)
    return Example(*(np.concatenate([asked[:prompt], answered[start:]]) for asked, answered in arrays))


def _fitted(
    group: Group, row_length: int, max_length: int | None, too_long: TooLong, last_token: bool
) -> tuple[str | None, Group | None]:
    """A group cut to fit a row, None where it is left out, and its fate before that: "truncated", "dropped", ….

    Args:
        group: The group.
        row_length: Tokens in a row.
        max_length: See `encode_preferences`.
        too_long: See `encode_preferences`.
        last_token: Whether the last token that is scored is an input too.
    """
    behind = 0 if last_token else 1  # tokens of a document that are no inputs
    if not all(one.learn.any() for one in group.documents):
        return "no_targets", None
    longest = row_length if max_length is None else min(row_length, max_length - behind)
    sizes = [_inputs(one.learn) + 1 - behind for one in group.documents]
    if max(sizes) <= longest and sum(sizes) <= row_length:
        return None, group
    if too_long == "drop":
        return "dropped", None
    room = min(longest, _common_length(sizes, row_length))
    cut = [Example(one.tokens[: room + behind], one.learn[: room + behind]) for one in group.documents]
    if not all(one.learn.any() for one in cut):
        return "no_targets", None
    return "truncated", group._replace(documents=cut)


def _inputs(learn: Bool[np.ndarray, " N"]) -> int:
    """Input tokens up to the one that predicts the last that is scored."""
    return int(np.flatnonzero(learn)[-1])


def _common_length(sizes: Sequence[int], room: int) -> int:
    """The largest length to which all sizes can be cut so that their sum fits."""
    left = room
    ascending = sorted(sizes)
    for number, size in enumerate(ascending):
        if size * (len(ascending) - number) > left:
            return left // (len(ascending) - number)
        left -= size
    return ascending[-1]
