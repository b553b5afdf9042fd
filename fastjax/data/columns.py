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
A message may set whether it is learnt: `"train": false`, or `"weight": 0`, as in OpenAI's format (LLaMA-Factory's
`loss_weight`). Templates do not see these, so that a conversation is the same text in training and afterwards.
`DataSource.columns` names the columns of a data set with other names, or with two kinds.
"""

import functools
from collections.abc import Mapping
from typing import Any, get_args

from convert import strict_json
from convert.errors import shorten, shown
from fastjax.data.cells import Cells, check_text, describe
from fastjax.data.records import ChatRecord, Message, Record, TextRecord, Written
from fastjax.data.settings import Role
from fastjax.data.token_rows import token_record
from fastjax.errors import DataError

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


def parse_messages(value: Any, where: str) -> list[Message]:
    """Read the messages of a conversation.

    Args:
        value: A list of messages, as in the column `messages`.
        where: The name of the list in errors.

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
    cells = Cells(row, where, columns, _KINDS_IN_WORDS)
    kind = _kind(cells)
    if kind == "text":
        return TextRecord(cells.text("text"), where)
    if kind == "input_ids":
        return token_record(cells)
    if kind == "prompt":
        prompt, completion = unpacked(cells["prompt"]), unpacked(cells["completion"])
        return completion_record(cells, prompt, completion, "completion", templated=templated)
    tools = _tools(cells)
    if kind == "instruction":
        return _with_context(ChatRecord(_instruction(cells), where, tools), cells)
    messages, train = _messages(cells[kind], where, cells.name(kind))
    return _with_context(ChatRecord(messages, where, tools, train=train), cells)


def completion_record(cells: Cells, prompt: Any, completion: Any, meaning: str, *, templated: bool = False) -> Written:
    """A prompt and its completion as an example, with the tools and the context of their row.

    Args:
        cells: The row.
        prompt: A text, or a list of messages.
        completion: The same.
        meaning: The meaning of the completion's column, for errors.
        templated: See `parse_row`.

    Raises:
        DataError: Values of the wrong type.
    """
    where, names, tools = cells.where, (cells.name("prompt"), cells.name(meaning)), _tools(cells)
    if isinstance(prompt, list) or isinstance(completion, list):
        asked, before = _messages(prompt, where, names[0])
        answered, behind = _messages(completion, where, names[1])
        train = None
        if before or behind:
            train = (*(before or (None,) * len(asked)), *(behind or (None,) * len(answered)))
        return _with_context(ChatRecord([*asked, *answered], where, tools, len(asked), train), cells)
    prompt, completion = check_text(prompt, where, names[0]), check_text(completion, where, names[1])
    if templated:
        return _with_context(ChatRecord(_question(prompt) + _answer(completion), where, tools), cells)
    return _with_context(TextRecord(prompt + completion, where, len(prompt)), cells)


def _with_context(record: Written, cells: Cells) -> Written:
    """A record with what its row says of the whole conversation: the system's message and the template's variables."""
    where, meaning = cells.where, "system" if cells["system"] is not None else "system_prompt"
    options = _json(cells["chat_template_kwargs"], where, cells.name("chat_template_kwargs")[1:-1])
    options = check_options({} if options is None else options, f"{where}: {cells.name('chat_template_kwargs')}")
    if (documents := cells["documents"]) is not None:
        if not isinstance(documents, list):
            raise cells.wrong("documents", "a list")
        options |= {"documents": documents}
    if not cells[meaning] and not options:
        return record
    if isinstance(record, TextRecord):
        given = meaning if cells[meaning] else "documents" if "documents" in options else "chat_template_kwargs"
        raise DataError(
            f"{where}: {cells.name(given)}: expected a conversation beside it, since prompt and completion of plain "
            "text have no chat template; name one (data.chat_template), or another column (columns)"
        )
    if cells[meaning]:
        system, first = cells.text(meaning), record.messages[0]
        if first["role"] not in ("system", "developer"):
            train = None if record.train is None else (None, *record.train)
            messages = [{"role": "system", "content": system}, *record.messages]
            record = record._replace(messages=messages, train=train, prompt=record.prompt and record.prompt + 1)
        elif first.get("content") != system:
            raise DataError(
                f"{where}: {cells.name(meaning)} and the system's message in the conversation are not the same: leave "
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


def _kind(cells: Cells) -> str:
    """The one kind with all its columns in the row."""
    wanted, named = _wanted(tuple(cells.columns.items()))
    present = cells.present()
    kinds = [kind for kind, needed in wanted.items() if present.issuperset(needed)]
    if len(kinds) == 1 or kinds[-1:] == ["input_ids"]:
        return kinds[-1]
    if kinds:
        raise DataError(
            f"{cells.where}: the columns of several kinds of example: {', '.join(kinds)}; say which to read, for "
            f"instance columns: {{{kinds[0]}: {cells.columns.get(kinds[0], kinds[0])}}}"
        )
    names = ", ".join(repr(name) for needed in wanted.values() for name in needed) if named else _KINDS_IN_WORDS
    way_out = "; to learn preferences, name a loss (preferences.loss)" if {"chosen", "rejected"} <= present else ""
    raise cells.lacks(shorten(names), way_out)


@functools.lru_cache(maxsize=16)
def _wanted(columns: tuple[tuple[str, str], ...]) -> tuple[dict[str, tuple[str, ...]], bool]:
    """Each kind → the columns that identify it, and whether `columns` names any of them."""
    names = dict(columns)
    named = {kind: needed for kind, needed in KINDS.items() if any(meaning in names for meaning in needed)}
    wanted = {kind: tuple(names.get(m, m) for m in needed) for kind, needed in (named or KINDS).items()}
    return wanted, bool(named)


def _instruction(cells: Cells) -> list[Message]:
    """The messages of an instruction and its output, behind the questions and answers before them."""
    instruction, output, given = cells.text("instruction"), cells.text("output"), cells["input"]
    question = _question(instruction)
    if given is not None and cells.text("input"):
        # A template may set the two apart, as Alpaca's does.
        question[0] |= {"content": f"{instruction}\n\n{given}", "instruction": instruction, "input": given}
    history, before = cells["history"], []
    if history is not None and not isinstance(history, list):
        raise cells.wrong("history", "a list of questions with answers")
    for number, turn in enumerate(history or ()):
        texts = list(turn) if isinstance(turn, list | tuple) else []
        if len(texts) != 2 or not all(isinstance(text, str) for text in texts):
            raise DataError(
                f"{cells.where}: {cells.name('history')}[{number}] must be a question and its answer, found "
                f"{describe(turn)}"
            )
        before += _question(texts[0]) + _answer(texts[1])
    return before + question + _answer(output)


def _question(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def _answer(text: str) -> list[Message]:
    return [{"role": "assistant", "content": text}]


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
    train, weight = message.get("train"), message.get("weight", message.get("loss_weight"))
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
    calls = next((calls for key in _CALLS if (calls := _json(message.get(key), where, key))), None)
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

_READ = frozenset(("train", "weight", "loss_weight", *_CALLS))
"""Keys of a message that templates do not see as they are."""


def _joined(content: Any, where: str, *, may_be_none: bool) -> str | None:
    """The text of content in parts; a tool call may have none."""
    if content is None and may_be_none:
        return None
    texts: list[Any] = [_text(part) for part in content] if isinstance(content, list) else [None]
    if all(isinstance(text, str) for text in texts):
        return "".join(texts)
    parts = "; parts other than texts are not read" if isinstance(content, list) else ""
    raise DataError(f"{where}: 'content' must be a string, found {describe(content)}{parts}")


def _text(part: Any) -> Any:
    """The text of a part of a content; LLaMA-Factory calls it value."""
    return (
        part.get("text", part.get("value") if part.get("type") == "text" else None) if isinstance(part, dict) else None
    )


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


def _tools(cells: Cells) -> list[dict[str, Any]] | None:
    """The callable functions, in OpenAI's format; many data sets store them as a string of JSON."""
    value = _json(cells["tools"], cells.where, "tools")
    if not value:
        return None
    tools = [_json(tool, cells.where, "tools") for tool in value] if isinstance(value, list) else []
    if not tools or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{cells.where}: 'tools' must be a list of JSON schemas, found {describe(value)}")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]


def unpacked(value: Any) -> Any:
    """A conversation that is written as JSON text, as tables hold one, as a list; anything else as it is.

    Args:
        value: The value of a column that may be plain text, too.
    """
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        messages = strict_json.parse(value)
    except ValueError:
        return value
    is_one = all(isinstance(message, dict) and message.keys() & {"role", "from"} for message in messages)
    return messages if messages and is_one else value


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
