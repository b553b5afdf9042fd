"""Rows of a data set of preferences to answers, by the meaning of their columns.

A row of pairs has `chosen` and `rejected`, and `prompt` or the prompt at the beginning of both (TRL's implicit prompt:
what the two have in common). A row of single answers has `prompt`, `completion` and `label`, true where the answer is
desirable; or the answer is the last of `messages` or `conversations`. Where single answers are wanted, a pair is one
desirable answer and one undesirable one. Each of these is a text or a list of messages, or of turns in ShareGPT's
format; an answer may be a single one. A column `tools` is read as in `columns`; of ranked pairs also a column `margin`,
a number.
"""

import math
from collections.abc import Mapping
from typing import Any

from fastjax.data.cells import Cells, describe
from fastjax.data.columns import completion_record, unpacked
from fastjax.data.records import PreferenceRecord
from fastjax.data.settings import Pairing
from fastjax.errors import DataError

_PAIR = ("chosen", "rejected")
_PAIRS = "chosen and rejected, with prompt or the prompt in both"
_EXPECTED: dict[Pairing, str] = {
    "paired": _PAIRS,
    "ranked": _PAIRS,
    "unpaired": "prompt, completion and label, messages and label, or chosen and rejected",
}


def parse_preference(
    row: Any, where: str, columns: Mapping[str, str] | None = None, *, pairing: Pairing, templated: bool = False
) -> PreferenceRecord:
    """Convert one row of a data set of preferences to its answers.

    Args:
        row: A mapping from column to value.
        where: File and line, for errors.
        columns: Meaning → column name; the default is the meaning itself.
        pairing: Whether pairs are wanted, with their margin (0 without one) or not, or single answers.
        templated: See `columns.parse_row`.

    Raises:
        DataError: Other columns, or values of the wrong type.
    """
    expected = _EXPECTED[pairing]
    cells = Cells(row, where, columns, expected)
    if all(cells[meaning] is not None for meaning in _PAIR):
        prompt, *said = _split(*_pair(cells), f"{where}: {cells.name('prompt')}")
        if not prompt and cells["prompt"] is None:
            both = " and ".join(map(cells.name, _PAIR))
            raise DataError(f"{where}: expected a prompt, or one that {both} begin with, got none")
        both = zip(said, _PAIR, strict=True)
        answers = tuple(completion_record(cells, prompt, one, name, templated=templated) for one, name in both)
        return PreferenceRecord(answers, (True, False), where, _margin(cells) if pairing == "ranked" else 0.0)
    prompt, completion = unpacked(cells["prompt"]), _answer(cells["completion"])
    told = next((unpacked(cells[name]) for name in ("messages", "conversations") if cells[name] is not None), None)
    if completion is None and isinstance(told, list) and len(told) > 1:
        prompt, completion = told[:-1], told[-1:]
    if pairing != "unpaired" or prompt is None or completion is None or cells["label"] is None:
        raise cells.lacks(expected)
    if cells["label"] not in (True, False):  # 1 and 0 are these
        raise cells.wrong("label", "true or false")
    answer = completion_record(cells, prompt, completion, "completion", templated=templated)
    return PreferenceRecord((answer,), (bool(cells["label"]),), where)


def _pair(cells: Cells) -> tuple[Any, Any, Any]:
    """The prompt and the two answers of a row, each a text or a list of messages."""
    chosen, rejected = (_answer(cells[meaning]) for meaning in _PAIR)
    for kind, what in ((str, "a string"), (list, "a list of messages")):
        if isinstance(chosen, kind) and not isinstance(rejected, kind):
            raise cells.wrong("rejected", f"{what}, as {cells.name('chosen')} is")
    if not isinstance(chosen, str | list):
        raise cells.wrong("chosen", "a string or a list of messages")
    return unpacked(cells["prompt"]), chosen, rejected


def _answer(value: Any) -> Any:
    """An answer as a text or a list of messages; it may be a single message."""
    value = unpacked(value)
    return [value] if isinstance(value, Mapping) and value else value


def _margin(cells: Cells) -> float:
    value = cells["margin"]
    try:
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)):
            return float(value or 0)
    except OverflowError:  # an integer beyond floating point
        pass
    raise cells.wrong("margin", "a finite number")


def _split(prompt: Any, chosen: Any, rejected: Any, where: str) -> tuple[Any, Any, Any]:
    """The prompt, and the two answers without it."""
    common = _common(chosen, rejected)
    if prompt is None:
        return chosen[:common], chosen[common:], rejected[common:]
    if isinstance(chosen, list) and isinstance(prompt, str):
        return _asked(prompt, chosen[:common], where), chosen[common:], rejected[common:]
    if isinstance(chosen, list) and isinstance(prompt, list):
        count = len(prompt)
        if _alike(prompt, chosen[:count]) and _alike(prompt, rejected[:count]):
            return prompt, chosen[count:], rejected[count:]
        shared = min(count, common)  # one of the two may have a system's message before what both have
        if shared and _alike(prompt[-shared:], chosen[common - shared : common]):
            return max(prompt, chosen[:common], key=len), chosen[common:], rejected[common:]
    return prompt, chosen, rejected


def _asked(prompt: str, begun: list[Any], where: str) -> list[Any]:
    """The messages of a prompt that is a text, where both answers begin with some; a system's may stand before it."""
    if any(_said(message) == prompt.strip() for message in begun):
        return begun  # the messages have it too
    if any(_speaker(message) not in ("system", "developer") for message in begun):
        raise DataError(
            f"{where}: expected a message of the beginning that both answers have, found {describe(prompt)}, which is "
            "none of them; leave it out, or give it as the list of messages that stand before the answers"
        )
    return [*begun, {"role": "user", "content": prompt}]


def _alike(messages: list[Any], others: list[Any]) -> bool:
    """Whether messages are the same but for white space around what they say."""
    one, other = ([(_speaker(message), _said(message)) for message in listed] for listed in (messages, others))
    return one == other


def _speaker(message: Any) -> Any:
    return message.get("role", message.get("from")) if isinstance(message, Mapping) else message


def _said(message: Any) -> Any:
    said = message.get("content", message.get("value")) if isinstance(message, Mapping) else message
    if isinstance(said, list) and all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in said):
        said = "".join(part["text"] for part in said)
    return said.strip() if isinstance(said, str) else said


def _common(chosen: Any, rejected: Any) -> int:
    """The length of what two texts or lists of messages begin with; something is left of each.

    A text's last space before the difference belongs to the answers, as a tokenizer has it.
    """
    most = min(len(chosen), len(rejected)) - 1
    length = next((n for n in range(most) if chosen[n] != rejected[n]), max(most, 0))
    return length - 1 if isinstance(chosen, str) and length and chosen[length - 1] == " " else length
