"""A row of a data set to an example: which columns mean what.

A row is a mapping from column to value. It holds one of five kinds of example, told apart by the columns that are
there and not null:

=============================  =========================================================================
messages                       a conversation, `{"role": …, "content": …}`; tool calls as OpenAI writes them
conversations                  the same as ShareGPT writes it, `{"from": …, "value": …}`
prompt, completion             two texts, or two lists of messages; only what the completion says is learnt
instruction, [input], output   a question and its answer
text                           a text, all of it learnt
=============================  =========================================================================

With the first four, a column `tools` lists the functions that the assistant may call. Other columns are left alone.
A data set whose columns are called otherwise, or that holds two kinds, says what they mean (`DataSource.columns`).
"""

import functools
import json
from collections.abc import Mapping
from typing import Any

from fastjax.data.records import ChatRecord, Message, Record, TextRecord
from fastjax.data.settings import COLUMNS
from fastjax.errors import ConfigError, DataError

ROLES = ("system", "developer", "user", "assistant", "tool")
"""The roles that a message may have."""

KINDS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    "text": ("text",),
}
"""The columns that each kind of example needs, by the first of them."""

SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "tool_response": "tool",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
}
"""Who speaks, as ShareGPT data sets call it, and as messages do."""


def check_columns(columns: Mapping[str, str]) -> None:
    """Refuse names for meanings that no column has.

    Args:
        columns: Meaning → the column's name here.

    Raises:
        ConfigError: An unknown meaning.
    """
    for meaning in columns:
        if meaning not in COLUMNS:
            raise ConfigError(f"columns: {meaning}: unknown; expected some of {', '.join(COLUMNS)}")


def parse_row(row: Any, where: str, columns: Mapping[str, str] | None = None, *, templated: bool = False) -> Record:
    """Make an example of one row of a data set.

    Args:
        row: The row: a mapping from column to value.
        where: File and line, for errors.
        columns: Meaning → the column's name here; a meaning not named has the column of its own name. Where one of a
            kind's columns is named, the row is of that kind.
        templated: Whether a prompt and a completion that are texts are a user's and an assistant's message; if not,
            they are one text.

    Returns:
        The example.

    Raises:
        DataError: No columns of a kind or those of several, or columns that hold something else than they should.
    """
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: expected an object with {_KINDS_IN_WORDS}, found {_describe(row)}")
    columns = columns or {}
    kind = _kind(row, where, columns)

    def value(meaning: str) -> Any:
        return row.get(columns.get(meaning, meaning))

    def name(meaning: str) -> str:
        return repr(columns.get(meaning, meaning))

    if kind == "text":
        return TextRecord(_text(value("text"), where, name("text")), where)
    tools = _tools(value("tools"), where)
    if kind == "messages":
        return ChatRecord(_messages(value(kind), where, name(kind)), where, tools)
    if kind == "conversations":
        turns = _list(value(kind), where, name(kind))
        return ChatRecord(
            [_turn(turn, f"{where}: {name(kind)[1:-1]}[{i}]") for i, turn in enumerate(turns)], where, tools
        )
    if kind == "instruction":
        return _instruction(value, where, name, tools)
    prompt, completion = value("prompt"), value("completion")
    if isinstance(prompt, list) or isinstance(completion, list):
        given = _messages(prompt, where, name("prompt"))
        return ChatRecord([*given, *_messages(completion, where, name("completion"))], where, tools, len(given))
    prompt, completion = _text(prompt, where, name("prompt")), _text(completion, where, name("completion"))
    if templated:
        return ChatRecord(_question(prompt) + _answer(completion), where, tools)
    return TextRecord(prompt + completion, where, len(prompt))


_KINDS_IN_WORDS = "messages, conversations, prompt and completion, instruction and output, or text"


def _kind(row: Mapping[str, Any], where: str, columns: Mapping[str, str]) -> str:
    """The one kind of which all columns are there."""
    wanted, named = _wanted(tuple(columns.items()))
    there = {name for name, value in row.items() if value is not None}
    found = [kind for kind, needed in wanted.items() if there.issuperset(needed)]
    if len(found) == 1:
        return found[0]
    if found:
        raise DataError(
            f"{where}: the columns of several kinds of example: {', '.join(found)}; say which to read, for instance "
            f"columns: {{{found[0]}: {columns.get(found[0], found[0])}}}"
        )
    names = ", ".join(repr(name) for needed in wanted.values() for name in needed) if named else _KINDS_IN_WORDS
    shown = ", ".join(str(name) if name in there else f"{name} (null)" for name in row) or "none"
    raise DataError(f"{where}: expected the columns {names}; the columns there are: {shown}")


@functools.lru_cache(maxsize=16)
def _wanted(columns: tuple[tuple[str, str], ...]) -> tuple[dict[str, tuple[str, ...]], bool]:
    """The columns by which each kind of example is known, and whether `columns` names any of them."""
    here = dict(columns)
    named = {kind: needed for kind, needed in KINDS.items() if any(meaning in here for meaning in needed)}
    wanted = {kind: tuple(here.get(m, m) for m in needed) for kind, needed in (named or KINDS).items()}
    return wanted, bool(named)


def _instruction(value: Any, where: str, name: Any, tools: Any) -> ChatRecord:
    instruction, output = (_text(value(meaning), where, name(meaning)) for meaning in ("instruction", "output"))
    given = value("input")
    question = _question(instruction)
    if given is not None and _text(given, where, name("input")):
        # A template may set the two apart, as Alpaca's does.
        question[0] |= {"content": f"{instruction}\n\n{given}", "instruction": instruction, "input": given}
    return ChatRecord(question + _answer(output), where, tools)


def _question(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def _answer(text: str) -> list[Message]:
    return [{"role": "assistant", "content": text}]


def _text(value: Any, where: str, name: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: {name} must be a string, found {_describe(value)}")
    return value


def _list(value: Any, where: str, name: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: {name} must be a list that is not empty, found {_describe(value)}")
    return value


def _messages(value: Any, where: str, name: str) -> list[Message]:
    messages = _list(value, where, name)
    return [_message(message, f"{where}: {name[1:-1]}[{index}]") for index, message in enumerate(messages)]


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict) or "role" not in message:
        raise DataError(f"{where}: expected an object with 'role' and 'content', found {_describe(message)}")
    role = message["role"]
    if role not in ROLES:
        raise DataError(f"{where}: unknown role {role!r}; the roles are {', '.join(ROLES)}")
    content = message.get("content")
    calls = message.get("tool_calls")
    if not isinstance(content, str):
        content = _joined(content, where, may_be_none=bool(calls))
    if not calls and None not in message.values() and content is message["content"]:
        return message
    # Templates expect a missing key, not None.
    message = {key: value for key, value in message.items() if value is not None} | {"content": content}
    if content is None:
        del message["content"]
    if calls:
        calls = calls if isinstance(calls, list) else [calls]
        message["tool_calls"] = [_call(call, f"{where}: tool_calls[{index}]") for index, call in enumerate(calls)]
    return message


def _joined(content: Any, where: str, *, may_be_none: bool) -> str | None:
    """The text of content that comes in parts; a tool call may come without any."""
    if content is None and may_be_none:
        return None
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    raise DataError(f"{where}: 'content' must be a string, found {_describe(content)}")


def _call(call: Any, where: str) -> dict[str, Any]:
    """A tool call as OpenAI writes it, with its arguments as an object, as templates expect them."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"{where}: expected an object with 'name' and 'arguments', found {_describe(call)}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            raise DataError(f"{where}: 'arguments' are not valid JSON: {_describe(arguments)}") from None
    function = {key: value for key, value in function.items() if value is not None} | {"arguments": arguments}
    outer = call if "function" in call else {}
    return {"type": "function"} | {k: v for k, v in outer.items() if v is not None} | {"function": function}


def _turn(turn: Any, where: str) -> Message:
    """A turn of a ShareGPT conversation as a message."""
    if not isinstance(turn, dict):
        raise DataError(f"{where}: expected an object with 'from' and 'value', found {_describe(turn)}")
    if "from" not in turn:
        return _message(turn, where)
    who, said = turn["from"], turn.get("value")
    if who not in SHAREGPT_ROLES:
        raise DataError(f"{where}: unknown speaker {who!r}; known are {', '.join(SHAREGPT_ROLES)}")
    role = SHAREGPT_ROLES[who]
    if who == "function_call":
        calls = _json(said, where, "value")
        return _message({"role": role, "content": None, "tool_calls": calls}, where)
    if said is None and turn.get("tool_calls"):
        return _message({"role": role, "content": None, "tool_calls": turn["tool_calls"]}, where)
    if not isinstance(said, str):
        raise DataError(f"{where}: 'value' must be a string, found {_describe(said)}")
    return _message({"role": role, "content": said, "tool_calls": turn.get("tool_calls")}, where)


def _tools(value: Any, where: str) -> list[dict[str, Any]] | None:
    """The functions that may be called; data sets often hold them as a string of JSON."""
    value = _json(value, where, "tools") if isinstance(value, str) and value.strip() else value
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError(f"{where}: 'tools' must be a list of JSON schemas, found {_describe(value)}")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in value]


def _json(value: Any, where: str, name: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        raise DataError(f"{where}: {name!r} is not valid JSON: {_describe(value)}") from None


def _describe(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
