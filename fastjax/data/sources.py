"""Reading examples: JSON lines whose rows hold a conversation or a text.

A row is a JSON object with `messages`, a list of `{"role": …, "content": …}`, or with `text`, a string. Other columns
are left alone. Whatever is wrong with a row is reported with its file and line, because the file is the user's and the
line is where to look.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fastjax.errors import DataError

ROLES = ("system", "developer", "user", "assistant", "tool")
"""The roles that a message may have."""

Message = dict[str, Any]
"""One message of a conversation: `role`, `content`, and whatever else the chat template reads."""


class TextRecord(NamedTuple):
    """A plain text, all of it to be learnt.

    Attributes:
        text: The text.
        where: File and line it came from, for messages to the user.
    """

    text: str
    where: str


class ChatRecord(NamedTuple):
    """A conversation.

    Attributes:
        messages: The messages in order, none of their values None.
        where: File and line it came from, for messages to the user.
    """

    messages: list[Message]
    where: str


Record = TextRecord | ChatRecord
"""An example as it was read."""


def read_jsonl(paths: str | Path | Iterable[str | Path]) -> Iterator[Record]:
    """Read examples from JSON lines files, one row at a time; blank lines are skipped.

    Args:
        paths: One file or several, read in the order given.

    Yields:
        A `ChatRecord` for a row with `messages`, a `TextRecord` for a row with `text`.

    Raises:
        OSError: A file that cannot be read.
        DataError: Broken UTF-8 or JSON, wrong columns, an unknown role; file and line are named.
    """
    for path in [paths] if isinstance(paths, str | Path) else paths:
        # Binary lines, so that a broken character is reported with its own line and not with a buffer's.
        with open(path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield parse_row(_parse_json(line, f"{path}:{number}"), f"{path}:{number}")


def parse_row(row: Any, where: str) -> Record:
    """Make an example of one row of a data set.

    Args:
        row: The row: a mapping from column to value.
        where: File and line, for errors.

    Returns:
        The example.

    Raises:
        DataError: The row has neither or both of the columns, or they hold something else than they should.
    """
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected a JSON object with 'messages' or 'text', found {_describe(row)}")
    columns = [name for name in ("messages", "text") if row.get(name) is not None]
    if len(columns) != 1:
        found = ", ".join(repr(name) for name in row) or "none"
        wanted = "expected one of the columns 'messages' and 'text'"
        raise DataError(f"{where}: {wanted}, found {'both' if columns else f'the columns {found}'}")
    value = row[columns[0]]
    if columns[0] == "messages":
        return ChatRecord(_check_messages(value, where), where)
    if not isinstance(value, str) or not value:
        raise DataError(f"{where}: 'text' must be a string that is not empty, found {_describe(value)}")
    return TextRecord(value, where)


def _parse_json(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not valid UTF-8 at byte {error.start} of the line") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON at column {error.colno}: {error.msg}") from error


def _check_messages(messages: Any, where: str) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: 'messages' must be a list that is not empty, found {_describe(messages)}")
    return [_check_message(message, f"{where}: messages[{index}]") for index, message in enumerate(messages)]


def _check_message(message: Any, where: str) -> Message:
    if not isinstance(message, dict) or "role" not in message:
        raise DataError(f"{where}: expected an object with 'role' and 'content', found {_describe(message)}")
    role = message["role"]
    if role not in ROLES:
        raise DataError(f"{where}: unknown role {role!r}; the roles are {', '.join(ROLES)}")
    content = message.get("content")
    # A tool call may come without words; templates expect a missing key there, not None.
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise DataError(f"{where}: 'content' must be a string, found {_describe(content)}")
    return {key: value for key, value in message.items() if value is not None}


def _describe(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
