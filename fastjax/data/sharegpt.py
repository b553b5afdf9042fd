"""Unsloth's helpers over data sets: conversations under common names, and conversations of rows with two columns.

A data set is one of the `datasets` library, or rows: an iterable of mappings, of which a list comes back.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from convert.errors import shorten, shown
from fastjax.data.cells import describe
from fastjax.data.columns import parse_messages
from fastjax.errors import ConfigError, DataError

Rows = Iterable[Mapping[str, Any]]
"""A data set: rows, or an object of the `datasets` library."""

_OPTIONAL = re.compile(r"\[\[(.+?)\]\]", re.DOTALL)
_COLUMN = re.compile(r"\{(.+?)\}")


def standardize_sharegpt(
    dataset: Rows,
    tokenizer: Any = None,
    aliases_for_system: Sequence[str] = ("system",),
    aliases_for_user: Sequence[str] = ("user", "human", "input"),
    aliases_for_assistant: Sequence[str] = ("gpt", "assistant", "output"),
    batch_size: int | None = None,
    num_proc: int | None = None,
) -> Any:
    """Give the messages of the column `conversations` the keys `role` and `content` and the roles of chat templates.

    Args:
        dataset: The data set; one without the column is returned as it is.
        tokenizer: Changes nothing here.
        aliases_for_system: Names of the system's role.
        aliases_for_user: Names of the user's role.
        aliases_for_assistant: Names of the assistant's role.
        batch_size: Changes nothing here.
        num_proc: Changes nothing here.

    Raises:
        DataError: A conversation that is none, or a role without a meaning.
    """
    del tokenizer, batch_size, num_proc
    aliases = (("system", aliases_for_system), ("user", aliases_for_user), ("assistant", aliases_for_assistant))
    roles = {alias: role for role, names in aliases for alias in names}

    def named(message: Any) -> Any:
        key = "from" if isinstance(message, Mapping) and "role" not in message else "role"
        who = message.get(key) if isinstance(message, Mapping) else None
        return {**message, key: roles[who]} if isinstance(who, str) and who in roles else message

    def standard(row: Mapping[str, Any]) -> dict[str, Any]:
        told = row.get("conversations")
        if not isinstance(told, list):
            return {}
        messages = parse_messages([named(message) for message in told], "conversations")
        flags = [{key: message[key] for key in ("train", "weight") if key in message} for message in told]
        return {"conversations": [message | learnt for message, learnt in zip(messages, flags, strict=True)]}

    return mapped(dataset, standard)


#: Unsloth's other name.
standardize_data_formats = standardize_sharegpt


def to_sharegpt(
    dataset: Rows,
    merged_prompt: str = "",
    merged_column_name: str = "instruction",
    output_column_name: str = "output",
    remove_unused_columns: bool = True,
    conversation_extension: int = 1,
    random_state: int = 3407,
) -> Any:
    """Make a conversation of each row: a column, or several merged into a prompt, and its answer.

    Args:
        dataset: The data set.
        merged_prompt: The question, with columns in braces; what stands in [[double brackets]] is left out of a row
            whose first column in it is empty. "": the column `merged_column_name`.
        merged_column_name: The column of the question.
        output_column_name: The column of the answer.
        remove_unused_columns: Keep `conversations` alone.
        conversation_extension: Rows of a conversation: each row begins one, and others follow, drawn at random.
        random_state: Seed of the draws.

    Returns:
        The data set with the column `conversations`, in ShareGPT's format.

    Raises:
        ConfigError: An extension below 1.
        DataError: A column that a row lacks, or conversations that are there already.
    """
    if not isinstance(conversation_extension, int) or conversation_extension < 1:
        raise ConfigError(
            f"conversation_extension: expected an integer from 1, got {shown(conversation_extension, 60)}"
        )
    rows = _rows(dataset)
    if rows and isinstance(rows[0].get("conversations"), list):
        raise DataError("to_sharegpt: expected rows without conversations, found some; standardize_sharegpt reads them")
    prompt = merged_prompt or f"{{{merged_column_name}}}"
    turns = [
        [
            {"from": "human", "value": _merged(prompt, row, f"row {number + 1}")},
            {"from": "gpt", "value": _cell(row, output_column_name, f"row {number + 1}")},
        ]
        for number, row in enumerate(rows)
    ]
    orders = [np.arange(len(rows))]
    orders += [np.random.default_rng(random_state + j).permutation(len(rows)) for j in range(1, conversation_extension)]
    joined = [[turn for index in each for turn in turns[index]] for each in zip(*orders, strict=True)]
    kept = [{} if remove_unused_columns else dict(row) for row in rows]
    found = [{**row, "conversations": one} for row, one in zip(kept, joined, strict=True)]
    make = getattr(dataset, "from_list", None)
    return found if make is None else make(found)


def mapped(dataset: Rows, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Any:
    """A data set with other cells.

    Args:
        dataset: The data set.
        change: A row's new cells.
    """
    if hasattr(dataset, "map"):
        return dataset.map(change)  # pyright: ignore[reportAttributeAccessIssue]
    return [{**row, **change(row)} for row in _rows(dataset)]


def _rows(dataset: Rows) -> list[Mapping[str, Any]]:
    rows = list(dataset) if isinstance(dataset, Iterable) else None
    if rows is None or not all(isinstance(row, Mapping) for row in rows):
        raise DataError(f"dataset: expected rows, each a mapping from column to value, found {describe(dataset)}")
    return rows


def _merged(prompt: str, row: Mapping[str, Any], where: str) -> str:
    """The question of a row."""

    def filled(text: str) -> str:
        return _COLUMN.sub(lambda found: _cell(row, found[1], where), text)

    def optional(part: str) -> str:
        first = _COLUMN.search(part)
        if first is None:
            raise ConfigError(f"merged_prompt: expected a column in [[{shorten(part, 60)}]], got none")
        return filled(part) if _cell(row, first[1], where) else ""

    parts = _OPTIONAL.split(prompt)
    return "".join(optional(part) if place % 2 else filled(part) for place, part in enumerate(parts))


def _cell(row: Mapping[str, Any], column: str, where: str) -> str:
    if column not in row:
        raise DataError(f"{where}: expected the column {column!r}, found {shorten(', '.join(map(repr, row)), 300)}")
    return "" if row[column] is None else str(row[column])
