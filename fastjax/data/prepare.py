"""Files to rows, in one call."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fastjax.data.documents import IGNORE, Documents
from fastjax.data.encoding import Encoder, LossOn
from fastjax.data.packing import PackedRows, pack_documents
from fastjax.data.sources import Record, read_jsonl
from fastjax.data.statistics import DataStatistics
from fastjax.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Dataset(NamedTuple):
    """A data set ready for `Batches`.

    Attributes:
        rows: Its rows.
        statistics: What became of its examples.
    """

    rows: PackedRows
    statistics: DataStatistics


def prepare(
    paths: str | Path | Iterable[str | Path],
    tokenizer: "PreTrainedTokenizerFast",
    max_seq_length: int,
    *,
    loss_on: LossOn = "responses",
    packing: bool = True,
) -> Dataset:
    """Read, encode and pack a data set.

    Args:
        paths: JSON lines files with `messages` or `text`.
        tokenizer: The model's tokenizer.
        max_seq_length: Tokens in a row; the beginning of a longer example is kept.
        loss_on: "responses" or "all"; see `Encoder`.
        packing: Whether examples share rows.

    Returns:
        The rows and their statistics.

    Raises:
        OSError: A file that cannot be read.
        ConfigError: A tokenizer without EOS, or without a chat template that is needed.
        DataError: A row that cannot be used, no row at all, or none with a token to learn.
    """
    paths = [paths] if isinstance(paths, str | Path) else list(paths)
    names = ", ".join(map(str, paths))
    return prepare_records(
        list(read_jsonl(paths)), tokenizer, max_seq_length, loss_on=loss_on, packing=packing, where=names
    )


def prepare_records(
    records: list[Record],
    tokenizer: "PreTrainedTokenizerFast",
    max_seq_length: int,
    *,
    loss_on: LossOn = "responses",
    packing: bool = True,
    where: str = "the data set",
) -> Dataset:
    """Encode and pack examples that were read already.

    Args:
        records: The examples.
        tokenizer: The model's tokenizer.
        max_seq_length: Tokens in a row.
        loss_on: "responses" or "all"; see `Encoder`.
        packing: Whether examples share rows.
        where: What to call the data set in errors.

    Returns:
        The rows and their statistics.

    Raises:
        ConfigError: A tokenizer without EOS, or without a chat template that is needed.
        DataError: No example at all, or none with a token to learn.
    """
    if not records:
        raise DataError(f"{where}: no examples")
    encoder = Encoder(tokenizer, loss_on)
    documents = Documents.from_examples(encoder.encode(records), max_seq_length)
    if not len(documents):
        raise DataError(
            f"{where}: none of the {len(records):,} examples has a token to learn: no response by the assistant "
            f"within the first {max_seq_length:,} tokens"
        )
    rows = pack_documents(documents, max_seq_length, packing=packing)
    statistics = DataStatistics(
        examples=len(records),
        documents=len(documents),
        truncated=documents.truncated,
        no_targets=documents.no_targets,
        tokens=len(documents.tokens),
        target_tokens=int(np.count_nonzero(documents.targets != IGNORE)),
        rows=len(rows),
        slots=len(rows) * max_seq_length,
    )
    return Dataset(rows, statistics)
