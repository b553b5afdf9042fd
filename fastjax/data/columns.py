"""Rows of a data set to examples, by the meaning of their columns.

A row is a mapping from column to value. It holds one of six kinds of example, told apart by its columns that are not
null:

=============================  =========================================================================
messages                       a conversation, `{"role": …, "content": …}`; tool calls as OpenAI writes them
conversations                  a conversation in ShareGPT's format, `{"from": …, "value": …}`
prompt, completion             two texts, or two lists of messages or turns; only the completion is learnt
instruction, [input], output   a question and its answer
text                           a text, all of it learnt
input_ids                      token ids, with labels or masks of what is learnt (`token_rows`)
=============================  =========================================================================

A row with input_ids may hold the columns that they were made of; these are ignored.
With the first four, a column `tools` lists the functions that the assistant may call, `system` (or `system_prompt`) is
what the system says before the conversation, `documents` and `chat_template_kwargs` are given to the chat template;
with instruction and output, `history` lists the questions and answers before. Other columns are ignored.
A message may set whether it is learnt: `"train": false`, or `"weight": 0`, as in OpenAI's format. Templates do not see
these two, so that a conversation is the same text in training and afterwards.
`DataSource.columns` names the columns of a data set with other names, or with two kinds.
"""

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any, get_args

from convert import strict_json
from convert.errors import shorten, shown
from fastjax.data.records import ChatRecord, Message, Record, TextRecord, Written
from fastjax.data.settings import COLUMNS, Role
from fastjax.data.token_rows import token_record
from fastjax.errors import ConfigError, DataError

ROLES = get_args(Role)
"""The roles of messages."""

KINDS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    "text": ("text",),
    "input_ids": ("input_ids",),
}
"""Each kind of example → the columns that it needs, the first of which is its name."""

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
"""Speakers of ShareGPT data sets → roles."""


def check_columns(columns: Mapping[str, str]) -> None:
    """Raise ConfigError for an unknown meaning of a column.

    Args:
        columns: Meaning → column name.

    Raises:
        ConfigError: An unknown meaning.
    """
    for meaning in columns:
        if meaning not in COLUMNS:
            raise ConfigError(f"columns: {shorten(meaning, 80)}: unknown; expected some of {', '.join(COLUMNS)}")


def parse_messages(value: Any, where: str) -> list[Message]:
    """Read the messages of a conversation.

    Args:
        value: A list of messages, as in the column `messages`.
        where: Its name in errors.

    Returns:
        The messages for templates.

    Raises:
        DataError: Anything else.
    """
    return [_either(message, f"{where}[{index}]") for index, message in enumerate(_list(value, where))]


def parse_row(row: Any, where: str, columns: Mapping[str, str] | None = None, *, templated: bool = False) -> Record:
    """Convert one row of a data set to an example.

    Args:
        row: The row: a mapping from column to value.
        where: File and line, for errors.
        columns: Meaning → column name; the default is the meaning itself. A kind with a named column is the row's kind.
        templated: Textual prompts and completions are a user's and an assistant's message; otherwise they are one
            text.

    Raises:
        DataError: The columns of no kind or of several, or values of the wrong type.
    """
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: expected an object with {_KINDS_IN_WORDS}, found {describe(row)}")
    columns = columns or {}
    kind = _kind(row, where, columns)

    def value(meaning: str) -> Any:
        return row.get(columns.get(meaning, meaning))

    def name(meaning: str) -> str:
        return shown(columns.get(meaning, meaning), 80)

    if kind == "text":
        return TextRecord(_text(value("text"), where, name("text")), where)
    if kind == "input_ids":
        return token_record(value, name, where)
    tools = parse_tools(value("tools"), where)
    if kind in ("messages", "conversations"):
        messages, train = _messages(value(kind), where, name(kind))
        record: Written = ChatRecord(messages, where, tools, train=train)
    elif kind == "instruction":
        record = _instruction(value, where, name, tools)
    else:
        names = name("prompt"), name("completion")
        prompt, completion = unpacked(value("prompt")), unpacked(value("completion"))
        record = completion_record(prompt, completion, where, names, tools, templated=templated)
    return with_context(record, value, name)


def completion_record(
    prompt: Any,
    completion: Any,
    where: str,
    names: tuple[str, str],
    tools: list[dict[str, Any]] | None = None,
    *,
    templated: bool = False,
) -> Written:
    """A prompt and its completion as an example.

    Args:
        prompt: A text, or a list of messages.
        completion: Likewise.
        where: Their place, for errors.
        names: Of their columns, for errors.
        tools: The functions that the assistant may call.
        templated: As of `parse_row`.

    Raises:
        DataError: Values of the wrong type.
    """
    if isinstance(prompt, list) or isinstance(completion, list):
        given, before = _messages(prompt, where, names[0])
        said, behind = _messages(completion, where, names[1])
        train = None
        if before or behind:
            train = (*(before or (None,) * len(given)), *(behind or (None,) * len(said)))
        return ChatRecord([*given, *said], where, tools, len(given), train)
    prompt, completion = _text(prompt, where, names[0]), _text(completion, where, names[1])
    if templated:
        return ChatRecord(_question(prompt) + _answer(completion), where, tools)
    return TextRecord(prompt + completion, where, len(prompt))


def with_context(record: Written, value: Callable[[str], Any], name: Callable[[str], str]) -> Written:
    """A record with what its row says of the whole conversation: the system's message and the template's variables.

    Args:
        record: The record.
        value: Gives the row's value of a meaning.
        name: Gives a column's name for errors.

    Raises:
        DataError: Values of the wrong type, or beside a plain text, or another system's message in the conversation.
    """
    called = "system"
    system = value("system")
    if system is None and (system := value("system_prompt")) is not None:
        called = "system_prompt"
    options = _json(value("chat_template_kwargs"), record.where, name("chat_template_kwargs")[1:-1])
    options = check_options({} if options is None else options, f"{record.where}: {name('chat_template_kwargs')}")
    if (documents := value("documents")) is not None:
        if not isinstance(documents, list):
            raise DataError(f"{record.where}: {name('documents')} must be a list, found {describe(documents)}")
        options |= {"documents": documents}
    if system in (None, "") and not options:
        return record
    if isinstance(record, TextRecord):
        given = name(called) if system else name("documents" if "documents" in options else "chat_template_kwargs")
        raise DataError(
            f"{record.where}: {given}: expected a conversation beside it, since prompt and completion of plain text "
            "have no chat template; name one (data.chat_template), or another column (columns)"
        )
    if system:
        system = _text(system, record.where, name(called))
        first = record.messages[0]
        if first["role"] not in ("system", "developer"):
            train = None if record.train is None else (None, *record.train)
            messages = [{"role": "system", "content": system}, *record.messages]
            record = record._replace(messages=messages, train=train, prompt=record.prompt and record.prompt + 1)
        elif first.get("content") != system:
            raise DataError(
                f"{record.where}: {name(called)} and the system's message in the conversation are not the same: leave "
                "one of them out"
            )
    return record._replace(options=options or None)


def check_options(options: Any, where: str) -> dict[str, Any]:
    """Check further variables of a chat template.

    Args:
        options: The variables.
        where: Their name in errors.

    Returns:
        A dict of them.

    Raises:
        DataError: No mapping of names, or one of the names that every template has.
    """
    reserved = ("messages", "tools", "add_generation_prompt", "documents")
    if not isinstance(options, Mapping) or not all(isinstance(key, str) and key.isidentifier() for key in options):
        raise DataError(f"{where} must be an object of names and values, found {describe(options)}")
    if wrong := [key for key in options if key in reserved]:
        raise DataError(f"{where}: expected none of {', '.join(reserved)}, which have columns, found {wrong[0]}")
    return dict(options)


_KINDS_IN_WORDS = "messages, conversations, prompt and completion, instruction and output, text, or input_ids"


def _kind(row: Mapping[str, Any], where: str, columns: Mapping[str, str]) -> str:
    """The one kind with all its columns in the row."""
    wanted, named = _wanted(tuple(columns.items()))
    there = {name for name, value in row.items() if value is not None}
    found = [kind for kind, needed in wanted.items() if there.issuperset(needed)]
    if len(found) == 1 or found[-1:] == ["input_ids"]:
        return found[-1]
    if found:
        raise DataError(
            f"{where}: the columns of several kinds of example: {', '.join(found)}; say which to read, for instance "
            f"columns: {{{found[0]}: {columns.get(found[0], found[0])}}}"
        )
    names = ", ".join(repr(name) for needed in wanted.values() for name in needed) if named else _KINDS_IN_WORDS
    listed = ", ".join(shorten(str(name) if name in there else f"{name} (null)", 80) for name in row) or "none"
    way_out = "; to learn preferences, name a loss (preferences.loss)" if {"chosen", "rejected"} <= there else ""
    raise DataError(
        f"{where}: expected the columns {shorten(names)}; the columns there are: {shorten(listed, 500)}{way_out}"
    )


@functools.lru_cache(maxsize=16)
def _wanted(columns: tuple[tuple[str, str], ...]) -> tuple[dict[str, tuple[str, ...]], bool]:
    """Each kind → the columns that identify it, and whether `columns` names any of them."""
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
    before: list[Message] = []
    history = value("history")
    if history is not None and not isinstance(history, list):
        raise DataError(
            f"{where}: {name('history')} must be a list of questions with answers, found {describe(history)}"
        )
    for number, turn in enumerate(history or ()):
        texts = list(turn) if isinstance(turn, list | tuple) else []
        if len(texts) != 2 or not all(isinstance(text, str) for text in texts):
            raise DataError(
                f"{where}: {name('history')}[{number}] must be a question and its answer, found {describe(turn)}"
            )
        before += _question(texts[0]) + _answer(texts[1])
    return ChatRecord(before + question + _answer(output), where, tools)


def _question(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def _answer(text: str) -> list[Message]:
    return [{"role": "assistant", "content": text}]


def _text(value: Any, where: str, name: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: {name} must be a string, found {describe(value)}")
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{where} must be a list that is not empty, found {describe(value)}")
    return value


def _messages(value: Any, where: str, name: str) -> tuple[list[Message], tuple[bool | None, ...] | None]:
    """The messages of a list, and their `train` flags; None: no message has one."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = _json(value, where, name[1:-1])
    listed = _list(value, f"{where}: {name}")
    messages = [_either(item, f"{where}: {name[1:-1]}[{index}]") for index, item in enumerate(listed)]
    train = tuple(_train(item, f"{where}: {name[1:-1]}[{index}]") for index, item in enumerate(listed))
    return messages, (None if train.count(None) == len(train) else train)


def _train(message: Mapping[str, Any], where: str) -> bool | None:
    """Whether a message is to be learnt; None: unset."""
    train, weight = message.get("train"), message.get("weight")
    if train is not None and not isinstance(train, bool):
        raise DataError(f"{where}: 'train' must be true or false, found {describe(train)}")
    if weight is None:
        return train
    if isinstance(weight, bool) or weight not in (0, 1):
        raise DataError(
            f"{where}: 'weight' must be 0 (not learnt) or 1 (learnt), found {describe(weight)}; weights between, or "
            "above, are not supported"
        )
    if train is not None and train != bool(weight):
        raise DataError(f"{where}: 'train' is {describe(train)} and 'weight' {describe(weight)}: leave one of them out")
    return bool(weight)


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict) or "role" not in message:
        raise DataError(f"{where}: expected an object with 'role' and 'content', found {describe(message)}")
    role = message["role"]
    role = _ROLES.get(role) if isinstance(role, str) else None
    if role is None:
        raise DataError(f"{where}: unknown role {shown(message['role'], 60)}; the roles are {', '.join(_ROLES)}")
    if role != message["role"]:
        message = message | {"role": role}
    content = message.get("content")
    if isinstance(content, list) and (thoughts := [part for part in content if _is_thought(part)]):
        content = [part for part in content if not _is_thought(part)]
        thought = "".join(part["thinking"] for part in thoughts)
        message = message | {"content": content, "reasoning_content": thought}
    calls = next((found for key in _CALLS if (found := _json(message.get(key), where, key))), None)
    if not isinstance(content, str):
        content = _joined(content, where, may_be_none=bool(calls))
    if not (None in message.values() or message.keys() & _READ) and content is message["content"]:
        return message
    # Templates expect a missing key, not None.
    message = {k: v for k, v in message.items() if v is not None and k not in _READ} | {"content": content}
    if content is None:
        del message["content"]
    if calls:
        calls = calls if isinstance(calls, list) else [calls]
        message["tool_calls"] = [_call(call, f"{where}: tool_calls[{index}]") for index, call in enumerate(calls)]
    return message


_ROLES = {role: role for role in ROLES} | {who: role for who, role in SHAREGPT_ROLES.items() if who != "function_call"}
_ROLES |= {"ipython": "tool"}
"""Names of roles → the role that templates know."""


def _is_thought(part: Any) -> bool:
    """Whether a part of a content is the thought before it, as Anthropic's format has them."""
    return isinstance(part, dict) and part.get("type") == "thinking" and isinstance(part.get("thinking"), str)


_CALLS = ("tool_calls", "function_call")
"""Keys of a message's calls; templates see the first. The other is OpenAI's older name, of one call."""

_READ = frozenset(("train", "weight", *_CALLS))
"""Keys of a message that templates do not see as they are."""


def _joined(content: Any, where: str, *, may_be_none: bool) -> str | None:
    """The text of content in parts; a tool call may have none."""
    if content is None and may_be_none:
        return None
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    raise DataError(f"{where}: 'content' must be a string, found {describe(content)}")


def _call(call: Any, where: str) -> dict[str, Any]:
    """A tool call in OpenAI's format, with its arguments as an object, as templates expect."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"{where}: expected an object with 'name' and 'arguments', found {describe(call)}")
    given = "arguments" if "arguments" in function else "parameters"  # as Llama writes them
    arguments = _json(function.get(given), where, given)
    function = {key: value for key, value in function.items() if value is not None and key != given}
    function["arguments"] = {} if arguments is None else arguments
    outer = call if "function" in call else {}
    return {"type": "function"} | {k: v for k, v in outer.items() if v is not None} | {"function": function}


def _either(message: Any, where: str) -> Message:
    """A message, or a turn of a ShareGPT conversation as one."""
    turn = isinstance(message, dict) and "from" in message and "role" not in message
    return (_turn if turn else _message)(message, where)


def _turn(turn: dict[str, Any], where: str) -> Message:
    """A turn of a ShareGPT conversation as a message."""
    who, said = turn["from"], turn.get("value")
    if not isinstance(who, str) or who not in SHAREGPT_ROLES:
        raise DataError(f"{where}: unknown speaker {shown(who, 60)}; known are {', '.join(SHAREGPT_ROLES)}")
    # What else a turn has, as its reasoning, is the message's.
    message = {key: value for key, value in turn.items() if key not in ("from", "value")}
    message |= {"role": SHAREGPT_ROLES[who], "content": said}
    if who == "function_call":
        return _message(message | {"content": None, "tool_calls": _json(said, where, "value")}, where)
    if not isinstance(said, str) and not (said is None and turn.get("tool_calls")):
        raise DataError(f"{where}: 'value' must be a string, found {describe(said)}")
    return _message(message, where)


def parse_tools(value: Any, where: str) -> list[dict[str, Any]] | None:
    """The callable functions; many data sets store them as a string of JSON.

    Args:
        value: Of the column `tools`.
        where: Its place, for errors.

    Returns:
        JSON schemas in OpenAI's format; None: there are none.

    Raises:
        DataError: Anything else.
    """
    value = _json(value, where, "tools")
    if not value:
        return None
    tools = [_json(tool, where, "tools") for tool in value] if isinstance(value, list) else []
    if not tools or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{where}: 'tools' must be a list of JSON schemas, found {describe(value)}")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]


def unpacked(value: Any) -> Any:
    """A conversation that is written as JSON text, as tables hold one, as a list; anything else as it is.

    Args:
        value: Of a column that may be plain text, too.
    """
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        found = strict_json.parse(value)
    except ValueError:
        return value
    is_one = all(isinstance(message, dict) and message.keys() & {"role", "from"} for message in found)
    return found if found and is_one else value


def _json(value: Any, where: str, name: str) -> Any:
    """A value that may be JSON text; None for text without any."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return strict_json.parse(value)
    except ValueError:
        raise DataError(f"{where}: {name!r} is not valid JSON: {describe(value)}") from None


def describe(value: Any) -> str:
    """A value as JSON, shortened, for errors.

    Args:
        value: Anything.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except RecursionError:
        return "what is nested too deep"
    text = text.encode("utf-8", "backslashreplace").decode()  # half a surrogate pair cannot be printed
    return text if len(text) <= 60 else f"{text[:57]}..."
