"""Rows that hold token ids, `input_ids`, with transformers' and TRL's names for what of them is learnt.

`labels` are the ids in their own places, −100 where nothing is learnt. Without them `assistant_masks` and
`completion_mask` say it, 1 where a token is learnt; without any, all are. `attention_mask` is 0 in padding, which is
left out. Nothing is added: neither BOS nor EOS.
"""

from typing import Any

import numpy as np
from jaxtyping import Int

from convert.errors import shorten
from fastjax.data.cells import Cells
from fastjax.data.documents import IGNORE
from fastjax.data.records import TokenRecord
from fastjax.data.settings import PARTS, LossOn
from fastjax.errors import DataError

_LARGEST = np.iinfo(np.int32).max


def token_record(cells: Cells) -> TokenRecord:
    """The example of a row that holds token ids.

    Args:
        cells: The row.

    Raises:
        DataError: Values that are no token ids or masks of their length, or several documents in one row.
    """

    def place(meaning: str) -> str:
        return f"{cells.where}: {cells.name(meaning)}"

    def mask(meaning: str) -> np.ndarray | None:
        if (given := cells[meaning]) is None:
            return None
        values = _alike(given, tokens, place(meaning), bools=True)
        if not np.isin(values, (0, 1)).all():
            raise DataError(f"{place(meaning)} must hold 0 and 1 alone, found {values.min()} to {values.max()}")
        return values.astype(bool)

    tokens = _integers(cells["input_ids"], place("input_ids"))
    if tokens.size and not 0 <= tokens.min() <= tokens.max() <= _LARGEST:
        raise DataError(f"{place('input_ids')} must be token ids, found {tokens.min()} to {tokens.max()}")
    positions, lengths = (
        None if cells[meaning] is None else _integers(cells[meaning], place(meaning))
        for meaning in ("position_ids", "seq_lengths")
    )
    if (positions is not None and (np.diff(positions) != 1).any()) or (lengths is not None and len(lengths) > 1):
        raise DataError(
            f"{place('input_ids')}: expected one document, found several, as {cells.name('position_ids')} or "
            f"{cells.name('seq_lengths')} says; give each a row of its own, which data.packing packs"
        )
    attended, completion = mask("attention_mask"), None
    if (labels := cells["labels"]) is not None:
        labels = _alike(labels, tokens, place("labels"))
        learn = labels != IGNORE
        attended = np.ones(len(tokens), bool) if attended is None else attended
        if wrong := np.flatnonzero(learn & attended & (labels != tokens)).tolist():
            raise DataError(
                f"{place('labels')} must be those of {cells.name('input_ids')} in the same places, or {IGNORE}, "
                f"found {labels[wrong[0]]} for {tokens[wrong[0]]} at {wrong[0]}"
            )
    else:
        assistant, completion = mask("assistant_masks"), mask("completion_mask")
        learn = np.ones(len(tokens), bool) if assistant is None else assistant
    span = slice(None)
    if attended is not None:
        inputs = np.flatnonzero(attended)
        span = slice(inputs[0], inputs[-1] + 1) if len(inputs) else slice(0)
        if not attended[span].all():
            raise DataError(f"{place('attention_mask')}: expected 0 at the ends alone, found it between others")
    completion = None if completion is None else completion[span]
    return TokenRecord(tokens[span].astype(np.int32), learn[span], cells.where, completion)


def token_spans(record: TokenRecord, loss_on: LossOn) -> tuple[list[int], list[tuple[int, int]]]:
    """The tokens of an example and the ranges of its targets.

    Args:
        record: The example.
        loss_on: See `Encoder`; a completion alone is learnt, unless all is.

    Raises:
        DataError: A `loss_on` that is searched for in texts.
    """
    if isinstance(loss_on, dict):
        raise DataError(
            f"{record.where}: input_ids: expected loss_on responses or all, with labels or masks to say what is "
            f"learnt, got {' and '.join(PARTS)}, which are searched for in texts"
        )
    learn = record.learn
    if record.completion is not None and loss_on != "all":
        learn = learn & record.completion
    edges = np.flatnonzero(np.diff(learn, prepend=False, append=False)).reshape(-1, 2)
    return record.tokens.tolist(), [(start, end) for start, end in edges.tolist()]


def _alike(value: Any, tokens: np.ndarray, where: str, *, bools: bool = False) -> np.ndarray:
    values = _integers(value, where, bools=bools)
    if len(values) != len(tokens):
        raise DataError(f"{where}: expected {len(tokens)} values, one for each token, found {len(values)}")
    return values


def _integers(value: Any, where: str, *, bools: bool = False) -> Int[np.ndarray, " N"]:
    try:
        values = np.asarray(value)
    except (ValueError, TypeError, OverflowError):
        values = np.zeros((), object)
    if values.ndim == 1 and not values.size:
        return np.zeros(0, np.int64)
    if values.ndim != 1 or values.dtype.kind not in ("iub" if bools else "iu"):
        raise DataError(f"{where} must be a list of integers, found {shorten(repr(value), 60)}")
    return values.astype(np.int64)
