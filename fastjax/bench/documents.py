"""Rows of documents of given lengths: drawn or from a file, packed as training packs them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int32

from fastjax.data.packing import best_fit
from fastjax.errors import ConfigError

#: The lengths of each row's documents, the rest of the row being padding.
Documents = Sequence[Sequence[int]]


def chat_lengths(tokens: int, most: int) -> list[int]:
    """Lengths of chats: log-normal, half of them under 365 tokens, their mean 600.

    That is a round figure for public chat sets, most of which lie within a factor of two of it, and of no one set.

    Args:
        tokens: about how many in all, four times over, so that rows can be chosen.
        most: longer ones are cut.
    """
    rng = np.random.default_rng(0)
    count = max(16, 4 * tokens // 600)
    return np.clip(np.exp(rng.normal(5.9, 1.0, count)).astype(int), 8, most).tolist()


def read_lengths(path: Path) -> list[int]:
    """Lengths of documents from a file: .npy, or a number a line.

    Raises:
        ConfigError: it is no such file.
        OSError: it cannot be read.
    """
    try:
        values = np.load(path) if path.suffix == ".npy" else np.loadtxt(path, ndmin=1)
    except ValueError as error:
        raise ConfigError(f"--lengths {path}: expected .npy or a number a line, got another file ({error})") from None
    values = values.reshape(-1)
    if not values.size or not np.all((values >= 1) & (values == np.floor(values))):
        raise ConfigError(f"--lengths {path}: expected whole numbers of at least 1, got {values[:8]}")
    return values.astype(int).tolist()


def packed(lengths: Sequence[int], batch: int, row: int) -> tuple[tuple[int, ...], ...]:
    """Rows of documents, packed as training packs them, and some of the rows by chance.

    Args:
        lengths: of the documents; longer ones than a row are cut.
        batch: rows.
        row: tokens of a row.

    Raises:
        ConfigError: there are fewer rows.
    """
    cut = np.minimum(lengths, row)
    bins = best_fit(cut, row)
    if len(bins) < batch:
        raise ConfigError(f"--lengths: expected documents for {batch} rows of {row} tokens, got {cut.sum()} tokens")
    if len(bins) > batch:  # the last documents leave a row that is not full, one of thousands in a whole data set
        bins.remove(min(bins, key=lambda members: cut[members].sum()))
    chosen = np.random.default_rng(0).choice(len(bins), batch, replace=False)
    return tuple(tuple(int(cut[item]) for item in bins[index]) for index in chosen)


def segment_ids(documents: Documents, length: int) -> Int32[np.ndarray, "B S"]:
    """The document of each token, from 1; 0 is padding.

    Args:
        documents: of each row.
        length: S.
    """
    ids = np.zeros((len(documents), length), np.int32)
    for row, lengths in zip(ids, documents, strict=True):
        row[: sum(lengths)] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return ids
