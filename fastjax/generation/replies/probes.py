"""Renderings of a chat template with probes in thought, content and calls, and what stands around them.

Where two calls are rendered, the text between them is the end of one and the beginning of the next; it is parted where
the text behind the last call goes on otherwise.
"""

import contextlib
import json
import os
import re
from typing import Any

from fastjax.data.records import Message
from fastjax.data.template import ChatTemplate
from fastjax.errors import DataError
from fastjax.generation.replies.call_format import ArgumentFormat, CallFormat, LiteralFormat, loose

_THOUGHT, _CONTENT = "thoughtprobe", "contentprobe"
_NAMES, _KEYS = ("nameprobe", "nomenprobe"), ("clefprobe", "keyprobe")
_TEXTS, _NUMBER = ("valueprobe", "wertprobe"), 731
_IDS = ("731731731", "731731732")
_ASKED: Message = {"role": "user", "content": "question"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "tool",
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
    },
}
_CALLS = [
    {"type": "function", "id": id_, "function": {"name": name, "arguments": arguments}}
    for id_, name, arguments in zip(
        _IDS, _NAMES, ({_KEYS[0]: _TEXTS[0], _KEYS[1]: _NUMBER}, {_KEYS[0]: _TEXTS[1]}), strict=True
    )
]
#: A tag at the end of a text, and at its beginning.
_OPENING = re.compile(r"(<[^<>\n]{1,60}>\w*|\[[A-Z_ ]{3,}\])\s*$")
_CLOSING = re.compile(r"\s*(<[^<>\n]{1,60}>|\[[A-Z_/ ]{3,}\])")
#: Thoughts that templates take from the content, where no probe of the reasoning's is rendered.
_INLINE = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>thought", "<channel|>"))


class Probes:
    """Texts that a template writes for messages of the assistant."""

    def __init__(self, template: ChatTemplate):
        """Take a template; nothing is rendered yet."""
        self._template = template

    @property
    def has_channels(self) -> bool:
        """Whether answers are harmony's messages."""
        said = self._rendered({"role": "assistant", "content": _CONTENT}).partition(_CONTENT)[0]
        return said.endswith("<|channel|>final<|message|>")

    def reasoning(self) -> tuple[str, str] | None:
        """The texts before and behind a thought."""
        answer: Message = {"role": "assistant", "content": _CONTENT, "reasoning_content": _THOUGHT}
        thought = {"role": "assistant", "content": "", "reasoning_content": _THOUGHT, "tool_calls": _CALLS[:1]}
        for message, behind in ((answer, _CONTENT), (thought, _NAMES[0])):
            said = self._rendered(message, tools=behind is not _CONTENT)
            before, found, after = said.partition(_THOUGHT)
            opening, closing = _OPENING.search(before), _CLOSING.match(after)
            if found and behind in after and opening and closing:
                again = _OPENING.search(after.partition(behind)[0])
                headed = again is not None and again[1] == opening[1]  # the end of a header, which contents have too
                return None if headed else (opening[1], closing[1])
        prompt, source = self._prompt(tools=False), self._template.source
        return next((pair for pair in _INLINE if pair[1] in source and (pair[0] in source or pair[0] in prompt)), None)

    def calls(self) -> CallFormat | None:
        """How calls are written; None: not at all, or in none of the forms that are read."""
        for count in (2, 1):
            said = self._called(count)
            if said is None:
                continue
            text, end = said
            with contextlib.suppress(ValueError):
                forms = (read(text, end, count) for read in (_object, _named, _tagged, _literal))
                form = next((form for form in forms if form is not None), None)
                return form if form and (form.markers or form.name_key is not None) else None
        return None

    def _called(self, count: int) -> tuple[str, str] | None:
        """The assistant's text of calls, and the text that ends a turn; None: the template refuses them."""
        arguments: list[Any] = [_CALLS[:count], [_with_text(call) for call in _CALLS[:count]]]
        for calls in arguments:
            said = self._rendered({"role": "assistant", "content": "", "tool_calls": calls}, tools=True)
            plain = self._rendered({"role": "assistant", "content": _CONTENT}, tools=True)
            if not all(name in said for name in _NAMES[:count]) or _CONTENT not in plain:
                continue
            before, _, end = plain.partition(_CONTENT)
            start = len(os.path.commonprefix([said, before]))
            inside = re.search(r"(<[^<>\s]*|\[[A-Z_/]*)$", said[:start])
            text = said[start if inside is None else inside.start() :]
            thought = self.reasoning()
            head, tag, tail = text.partition("" if thought is None else thought[1]) if thought else (text, "", "")
            return tail if tag and _NAMES[0] not in head else text, end
        return None

    def _prompt(self, *, tools: bool) -> str:
        return self._rendered(tools=tools, prompted=True)

    def _rendered(self, *messages: Message, tools: bool = False, prompted: bool = False) -> str:
        """A conversation's text; "" where the template refuses it."""
        try:
            variables = {"tools": [_TOOL] if tools else None}
            chat = [_ASKED, *messages]
            return self._template.render(chat, "a probe", variables, add_generation_prompt=prompted).text
        except DataError:
            return ""


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    """A call with its arguments as text."""
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"])}}


def _object(text: str, end: str, count: int) -> CallFormat | None:
    """Calls that are JSON objects with name and arguments."""
    spans = []
    for call in _CALLS[:count]:
        name = text.index(call["function"]["name"])
        found = _containing(text, name)
        if found is None:
            return None
        spans.append((*found, call["function"]))
    start, _, value, function = spans[0]
    name_key = next((key for key, item in value.items() if item == function["name"]), None)
    arguments_key = next((key for key, item in value.items() if item == function["arguments"]), None)
    if arguments_key is None:
        return None
    name_key = "" if name_key is None and arguments_key == function["name"] else name_key
    if name_key is None:
        return None
    between = text[spans[0][1] : spans[1][0]] if count == 2 else ""
    behind = _without(text[spans[-1][1] :], end)
    opening = text[:start]
    return CallFormat(
        opening, "{", closing=(between, behind), name_key=name_key, arguments_key=arguments_key if name_key else ""
    )


def _containing(text: str, place: int) -> tuple[int, int, dict[str, Any]] | None:
    """The outermost JSON object around a place: its range and its value."""
    for found in re.finditer("{", text[:place]):
        with contextlib.suppress(ValueError):
            value, end = json.JSONDecoder().raw_decode(text, found.start())
            if end > place:
                return found.start(), end, value
    return None


def _named(text: str, end: str, count: int) -> CallFormat | None:
    """Calls whose name stands before a JSON object."""
    spans = []
    for call in _CALLS[:count]:
        name = text.index(call["function"]["name"])
        start = text.find("{", name)
        if start < 0:
            return None
        try:
            value, stop = json.JSONDecoder().raw_decode(text, start)
        except ValueError:
            return None
        if value != call["function"]["arguments"]:
            return None
        spans.append((name, name + len(call["function"]["name"]), start, stop))
    opening, before, closing = _parted(text, [(span[0], span[3]) for span in spans], end)
    return CallFormat(opening, before, text[spans[0][1] : spans[0][2]], closing)


def _tagged(text: str, end: str, count: int) -> CallFormat | None:
    """Calls whose arguments are tags."""
    name = text.index(_NAMES[0])
    first, value = text.index(_KEYS[0], name), text.index(_TEXTS[0], name)
    second, number = text.index(_KEYS[1], value), text.index(str(_NUMBER), text.index(_KEYS[1], value))
    if not name < first < value < second < number:
        return None
    joint = text[value + len(_TEXTS[0]) : second]
    tail = text[number + len(str(_NUMBER)) :]
    after = _to_tag(os.path.commonprefix([joint, tail]))
    before = joint[len(after) :]
    if not after.strip() or not before.strip():
        return None
    opened = text[name + len(_NAMES[0]) : first]
    texts = [text[first + len(_KEYS[0]) : value], text[second + len(_KEYS[1]) : number]]
    argument = ArgumentFormat(before.strip(), _between(*texts), texts[0] if texts[0] != texts[1] else None, after)
    between = opened[: opened.rindex(before.strip())]
    if count == 2:
        last = text.index(_TEXTS[1]) + len(_TEXTS[1])
        ends = [number + len(str(_NUMBER)) + len(after), last + len(after)]
        spans = [(name, ends[0]), (text.index(_NAMES[1], ends[0]), ends[1])]
    else:
        spans = [(name, number + len(str(_NUMBER)) + len(after))]
    opening, begun, closing = _parted(text, spans, end)
    return CallFormat(opening, begun, between, closing, argument=argument)


def _literal(text: str, end: str, count: int) -> CallFormat | None:
    """Calls whose arguments are literals in brackets."""
    name = text.index(_NAMES[0])
    first, value = text.index(_KEYS[0], name), text.index(_TEXTS[0], name)
    second = text.index(_KEYS[1], value)
    number = text.index(str(_NUMBER), second)
    bracket = text[name + len(_NAMES[0]) : first]
    assign = text[second + len(_KEYS[1]) : number].strip()
    quote = text[first + len(_KEYS[0]) : value].strip().removeprefix(assign)
    behind = text[value + len(_TEXTS[0]) : second]
    closing = {"(": ")", "{": "}"}.get(bracket.strip(), "")
    if not (closing and assign and quote and behind.startswith(quote) and behind[len(quote) :].strip() == ","):
        return None
    ends = [text.index(closing, number) + 1]
    spans = [(name, ends[0])]
    if count == 2:
        again = text.index(_NAMES[1], ends[0])
        spans.append((again, text.index(closing, text.index(_TEXTS[1], again)) + 1))
    opening, before, closings = _parted(text, spans, end)
    follows = count == 2 and text[ends[0] : spans[1][0]].strip() == ","
    return CallFormat(
        opening, before, bracket, closings, literal=LiteralFormat(assign, quote, closing), follows=follows
    )


def _parted(text: str, spans: list[tuple[int, int]], end: str) -> tuple[str, str, tuple[str, ...]]:
    """The text before all calls, before each, and those behind one and behind all.

    Args:
        text: the assistant's.
        spans: of each call the place of its name and the end of its arguments.
        end: the text that ends a turn.
    """
    head, tail = text[: spans[0][0]], _without(text[spans[-1][1] :], end)
    if len(spans) == 1:
        return "", head, (tail,)
    joint = text[spans[0][1] : spans[1][0]]
    closing = _to_tag(os.path.commonprefix([joint, tail]))
    before = joint[len(closing) :]
    begun = re.search(rf"{loose(before)}$", head)
    if begun is None or not before.strip():
        return "", head, (joint, tail)
    return head[: begun.start()], begun[0], (closing, tail)


def _to_tag(text: str) -> str:
    """A text up to the end of its last tag."""
    place = max(text.rfind(end) for end in (">", "]", "```"))
    return text[: place + (3 if text[place : place + 3] == "```" else 1)]


def _without(text: str, end: str) -> str:
    """A text without what ends a turn."""
    return text.rstrip().removesuffix(end.strip())


def _between(first: str, second: str) -> str:
    """A pattern of the text between an argument's name and its value, which may tell the value's type."""
    common = os.path.commonprefix([first, second])
    behind = os.path.commonprefix([first[len(common) :][::-1], second[len(common) :][::-1]])[::-1]
    if first == second:
        return loose(first.rstrip("\n")) if first.strip() else r"\s*"
    return loose(common) + r"[^<>]*?" + loose(behind.rstrip("\n"))
