"""Rows of a data set of preferences to answers, by the meaning of their columns.

A row of pairs has `chosen` and `rejected`, and `prompt` or the prompt at the beginning of both (TRL's implicit prompt:
what the two have in common). A row of single answers has `prompt`, `completion` and `label`, true where the answer is
desirable; where single answers are wanted, a pair is one desirable answer and one undesirable one. Each of these is a
text or a list of messages, or of turns in ShareGPT's format; an answer may be a single one. A column `tools` is read as
in `columns`; of ranked pairs also a column `margin`, a number.
"""

import math
from collections.abc import Mapping
from typing import Any

from convert.errors import shorten, shown
from fastjax.data.columns import completion_record, describe, parse_tools, unpacked, with_context
from fastjax.data.records import PreferenceRecord
from fastjax.data.settings import Pairing
from fastjax.errors import DataError

_PAIR, _SINGLE = ("chosen", "rejected"), ("prompt", "completion", "label")
_PAIRS = "chosen and rejected, with prompt or the prompt in both"
_EXPECTED: dict[Pairing, str] = {
    "paired": _PAIRS,
    "ranked": _PAIRS,
    "unpaired": "prompt, completion and label, or chosen and rejected",
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
        templated: As of `columns.parse_row`.

    Raises:
        DataError: Other columns, or values of the wrong type.
    """
    expected = _EXPECTED[pairing]
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: expected an object with {expected}, found {describe(row)}")
    names = {meaning: (columns or {}).get(meaning, meaning) for meaning in (*_SINGLE, *_PAIR, "tools", "margin")}
    values = {meaning: row.get(name) for meaning, name in names.items()}
    for meaning in ("prompt", *_PAIR, "completion"):
        values[meaning] = message = unpacked(values[meaning])
        if meaning != "prompt" and isinstance(message, Mapping) and message:
            values[meaning] = [message]
    shown_names = {meaning: shown(name, 80) for meaning, name in names.items()}
    tools = parse_tools(values["tools"], where)

    def answer(prompt: Any, meaning: str, said: Any) -> Any:
        own = shown_names["prompt"], shown_names[meaning]
        record = completion_record(prompt, said, where, own, tools, templated=templated)
        named = columns or {}
        return with_context(
            record, lambda name: row.get(named.get(name, name)), lambda name: shown(named.get(name, name), 80)
        )

    if all(values[meaning] is not None for meaning in _PAIR):
        chosen, rejected = values["chosen"], values["rejected"]
        for kind, what in ((str, "a string"), (list, "a list of messages")):
            if isinstance(chosen, kind) and not isinstance(rejected, kind):
                raise DataError(
                    f"{where}: {shown_names['rejected']} must be {what}, as {shown_names['chosen']} is, found "
                    f"{describe(rejected)}"
                )
        if not isinstance(chosen, str | list):
            raise DataError(
                f"{where}: {shown_names['chosen']} must be a string or a list of messages, found {describe(chosen)}"
            )
        prompt, *said = _split(values["prompt"], chosen, rejected, f"{where}: {shown_names['prompt']}")
        if not prompt and values["prompt"] is None:
            both = f"{shown_names['chosen']} and {shown_names['rejected']}"
            raise DataError(f"{where}: expected a prompt, or one that {both} begin with, got none")
        answers = tuple(answer(prompt, meaning, one) for meaning, one in zip(_PAIR, said, strict=True))
        margin = _margin(values["margin"], where, shown_names["margin"]) if pairing == "ranked" else 0.0
        return PreferenceRecord(answers, (True, False), where, margin)
    if pairing == "unpaired" and all(values[meaning] is not None for meaning in _SINGLE):
        label = values["label"]
        if label not in (True, False):  # 1 and 0 are these
            raise DataError(f"{where}: {shown_names['label']} must be true or false, found {describe(label)}")
        label = bool(label)
        return PreferenceRecord((answer(values["prompt"], "completion", values["completion"]),), (label,), where)
    listed = ", ".join(shorten(str(name) if value is not None else f"{name} (null)", 80) for name, value in row.items())
    raise DataError(
        f"{where}: expected the columns {expected}; the columns there are: {shorten(listed or 'none', 500)}"
    )


def _margin(value: Any, where: str, name: str) -> float:
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"{where}: {name} must be a finite number, found {describe(value)}")
    return float(value)


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
    length = next((place for place in range(most) if chosen[place] != rejected[place]), max(most, 0))
    return length - 1 if isinstance(chosen, str) and length and chosen[length - 1] == " " else length
