"""Encoded examples of any kind, and their packing into the rows and counts of a data set."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, Shaped

from convert.errors import shown
from fastjax.data import cache, notes
from fastjax.data.dataset import Dataset, DataStatistics
from fastjax.data.documents import IGNORE, Documents, Examples, spans
from fastjax.data.encoding import Encoder
from fastjax.data.packing import Origins, pack_documents
from fastjax.data.preferences import Role
from fastjax.data.records import PreferenceRecord, Record
from fastjax.data.settings import PARTS, DataOptions, LossOn
from fastjax.errors import DataError

Say = Callable[[str], None]
"""Takes a message for people."""

_REPORT = 100_000
"""Examples between two progress messages."""


class Encoded(NamedTuple):
    """Examples as documents.

    Attributes:
        documents: At least one.
        noted: The rows that people should know of.
        starts: The first document of each group that stays in one row, and their number at the end; None: each document
            is a group.
        fields: Further numbers of each document, by name.
        labelled: Whether the roles among the fields are labels of single answers.
    """

    documents: Documents
    noted: notes.Notes
    starts: Int64[np.ndarray, " G_plus_1"] | None = None
    fields: Mapping[str, Shaped[np.ndarray, " D"]] = {}
    labelled: bool = False

    def packed(
        self,
        records: Sequence[Record] | Sequence[PreferenceRecord],
        row_length: int,
        options: DataOptions,
        order: Int64[np.ndarray, " _"],
    ) -> Dataset:
        """Pack the documents into rows.

        Args:
            records: The examples.
            row_length: Tokens in a row.
            options: The options of the data.
            order: The examples of an epoch, with repetitions.
        """
        documents, counts, chosen = self.documents, self.documents.counts, None
        if len(order) != len(records):  # some repeat: so do all of their groups
            examples = documents.examples if self.starts is None else documents.examples[self.starts[:-1]]
            first, behind = (np.searchsorted(examples, order, side) for side in ("left", "right"))
            chosen = spans(first, behind - first)
        origins = Origins.of(record.where for record in records)
        rows = pack_documents(
            documents,
            row_length,
            packing=options.packing,
            starts=self.starts,
            chosen=chosen,
            origins=origins,
            fields=self.fields,
        )
        learnt = np.add.reduceat(documents.targets != IGNORE, documents.offsets[:-1], dtype=np.int64)
        roles = self.fields["roles"][rows.order] if self.labelled else np.zeros(0, np.int32)
        statistics = DataStatistics(
            **counts._replace(examples=len(order))._asdict(),
            documents=len(rows.order),
            tokens=int(documents.lengths[rows.order].sum()),
            target_tokens=int(learnt[rows.order].sum()),
            rows=len(rows),
            slots=len(rows) * row_length,
            notes=self.noted,
            special_tokens=options.special_tokens,
            desirable=int(np.sum(roles == Role.CHOSEN)),
            undesirable=int(np.sum(roles == Role.REJECTED)),
        )
        largest = max(int(documents.tokens.max()), int(documents.targets.max()))
        return Dataset(rows, statistics, cache.fingerprint(rows), largest)


def encode_records(
    records: Sequence[Record],
    encoder: Encoder,
    max_seq_length: int,
    where: str,
    progress: Say | None,
) -> Encoded:
    """Encode examples as documents that fit a row.

    Args:
        records: The examples.
        encoder: The encoder of their texts.
        max_seq_length: Tokens in a row.
        where: The data set's name in errors.
        progress: Takes messages for people.

    Raises:
        ConfigError: A tokenizer without a chat template that is needed.
        DataError: No example with a token to learn.
    """
    parts: list[Documents] = []
    noted: notes.Notes = {}
    chunks = encoder.encode(records)
    for done, examples in told(chunks, len(records), "examples", where, progress):
        parts.append(Documents.of(examples, max_seq_length, encoder.options.too_long))
        notes.add(noted, examples.noted, records[done:])
    documents = Documents.concatenate(parts)
    if not len(documents):
        raise DataError(nothing_to_learn(where, documents, max_seq_length, encoder.options.loss_on))
    return Encoded(documents, noted)


def nothing_to_learn(where: str, documents: Documents, max_seq_length: int, loss_on: LossOn) -> str:
    """The message for data without a target token.

    Args:
        where: The data set.
        documents: The documents, none, with their counts.
        max_seq_length: Tokens in a row.
        loss_on: The target tokens.
    """
    counts = documents.counts
    missing = (
        f"text behind {shown(loss_on[PARTS[1]], 80)}" if isinstance(loss_on, dict) else "response by the assistant"
    )
    dropped = f"; {counts.dropped:,} are longer and dropped" if counts.dropped else ""
    return (
        f"{where}: none of the {counts.examples:,} examples has a token to learn: no {missing} "
        f"within the first {max_seq_length:,} tokens{dropped}"
    )


def told(
    chunks: Iterable[Examples], total: int, unit: str, where: str, progress: Say | None
) -> Iterator[tuple[int, Examples]]:
    """Chunks of examples with the number of those before each, and messages on the way.

    Args:
        chunks: The chunks of `Encoder.encode`.
        total: Number of records of all chunks.
        unit: What they are called.
        where: The data set's name.
        progress: Takes the messages; None: there are none.
    """
    done = reported = 0
    for examples in chunks:
        yield done, examples
        done += examples.count
        if progress is not None and done - reported >= _REPORT and done < total:
            progress(f"{where}: {done:,} of {total:,} {unit} encoded")
            reported = done
