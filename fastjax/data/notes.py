"""Rows that people should know of: counted by kind, each with the place of the first.

Most kinds are parts of a conversation that its chat template does not write. A part is taken to be written where the
longest stretch of it that no template needs to escape (as JSON or XML) stands in the text. Thoughts of turns that are
not learnt are not looked for: templates cut those on purpose.
"""

import collections
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from fastjax.data.records import Message, PreferenceRecord, Record
from fastjax.data.settings import SpecialTokens

SPECIAL, JOINED, IDENTICAL = "special", "joined", "identical"
CONTENT, REASONING, THOUGHTS = "content", "reasoning", "thoughts"
TOOL_CALLS, TOOLS, DOCUMENTS, VARIABLES = "tool_calls", "tools", "documents", "chat_template_kwargs"

_UNWRITTEN = "the chat template does not write"
KINDS = {
    SPECIAL: "with special tokens in what they say",
    CONTENT: f"with content that {_UNWRITTEN}",
    REASONING: f"with reasoning that {_UNWRITTEN}",
    THOUGHTS: f"with thoughts in their content that {_UNWRITTEN}",
    TOOL_CALLS: f"with tool calls that {_UNWRITTEN}",
    TOOLS: f"with tools that {_UNWRITTEN}",
    DOCUMENTS: f"with documents that {_UNWRITTEN}",
    VARIABLES: "with chat_template_kwargs that the chat template does not read",
    IDENTICAL: "whose chosen and rejected answer are the same tokens, from which no preference is learnt",
    JOINED: "with an answer that begins within a token of its prompt, where generation has other tokens",
}
"""Kind → words that stand behind the number of rows."""

_READ_AS: dict[SpecialTokens, str] = {
    "control": ", which are read as control tokens; special_tokens: text reads them as text",
    "text": ", which are read as text",
}

Notes = dict[str, tuple[int, str]]
"""Kind → number of rows, and the place of the first."""

_PLAIN = re.compile(r"[^\s\"'\\<>&/`{}\[\]|]+(?: +[^\s\"'\\<>&/`{}\[\]|]+)*")
_THOUGHT_ENDS = re.compile(r"</(?:\w+:)?(?:think\w*|thoughts?|reasoning)>|\[/THINK\]", re.IGNORECASE)


def add(
    notes: Notes, noted: Mapping[str, Sequence[int]], records: Sequence[Record] | Sequence[PreferenceRecord]
) -> list[str]:
    """Count further rows.

    Args:
        notes: Counts so far, which change.
        noted: Kind → indices of rows, ascending.
        records: The rows.

    Returns:
        Kinds that are new.
    """
    new = [kind for kind, rows in noted.items() if rows and kind not in notes]
    for kind, rows in noted.items():
        if rows:
            count, first = notes.get(kind) or (0, records[rows[0]].where)
            notes[kind] = count + len(rows), first
    return new


def say(kind: str, special_tokens: SpecialTokens) -> str:
    """The words for rows of a kind, to stand behind their number.

    Args:
        kind: One of the keys of `Notes`.
        special_tokens: The reading of special tokens in content.
    """
    return KINDS[kind] + (_READ_AS[special_tokens] if kind == SPECIAL else "")


def left_out(
    messages: Sequence[Message],
    variables: Mapping[str, Any],
    text: str,
    learnt: Mapping[int, tuple[str, str]],
    read: Collection[str],
) -> set[str]:
    """The kinds of parts that a rendering lacks.

    Args:
        messages: The conversation.
        variables: The template's other variables in it.
        text: The rendering.
        learnt: The index of each turn to learn → its own text, and the rendering in which it is learnt.
        read: Names of the variables that the template reads.

    Returns:
        Some of `KINDS`, such as TOOLS.
    """
    kinds = set()
    for index, message in enumerate(messages):
        said, within = learnt.get(index, (text, text))
        for kind, part in _parts(message, index in learnt):
            if not _stands(part, said if kind == TOOL_CALLS else within):
                kinds.add(kind)
    called = collections.Counter(_function(call) for message in messages for call in message.get("tool_calls") or ())
    for tool in variables.get("tools") or ():
        name = _function(tool)
        if name and text.count(name) <= called[name]:  # of a call or the tool that it calls one is missing
            about = _inner(tool).get("description")
            kinds.add(TOOL_CALLS if called[name] and _stands(about if isinstance(about, str) else "", text) else TOOLS)
    for document in variables.get("documents") or ():
        if not _stands(_longest(document), text):
            kinds.add(DOCUMENTS)
    if variables.keys() - {"tools", "documents"} - set(read):
        kinds.add(VARIABLES)
    return kinds


def _parts(message: Message, learnt: bool) -> Iterator[tuple[str, str]]:
    """The parts of a message that a text should have, each with its kind."""
    content = message.get("content") or ""
    if message["role"] == "assistant":
        thought, *_, content = _THOUGHT_ENDS.split(content) if _THOUGHT_ENDS.search(content) else ("", content)
        if learnt:
            yield THOUGHTS, thought
            yield REASONING, message.get("reasoning_content") or ""
        for call in message.get("tool_calls") or ():
            yield TOOL_CALLS, _function(call)
    yield CONTENT, content


def _function(value: Any) -> str:
    """The name of a function, of a call or a tool."""
    name = _inner(value).get("name")
    return name if isinstance(name, str) else ""


def _inner(value: Any) -> Mapping[str, Any]:
    """A function as templates take it, with or without its type around it."""
    value = value.get("function", value) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def _longest(value: Any) -> str:
    """The longest text in a JSON value."""
    if isinstance(value, str):
        return value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return max(map(_longest, inner), key=len, default="")


def _stands(part: str, text: str) -> bool:
    stretch = max(_PLAIN.findall(part), key=len, default="")
    return stretch in text
