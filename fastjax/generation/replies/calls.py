"""Reading one tool call, a character at a time.

The name is told as soon as it is known to be that of a function, and arguments as they come. Until then the text may
still turn out to be content.
"""

import json
import re
from collections.abc import Generator

from fastjax.generation.replies.call_format import ArgumentFormat, CallFormat, loose
from fastjax.generation.replies.literals import Literals, Reading
from fastjax.generation.replies.not_a_call import NotACallError
from fastjax.generation.replies.sink import Sink, Tools

HEAD = 1024
"""Characters of a call up to its arguments, at most."""
_OTHER_KEYS = {"id", "type", "index", "tool_call_id"}


class CallReader:
    """A call that is read.

    Attributes:
        raw: the text so far.
        begun: whether its name was told.
        done: whether it is complete.
    """

    def __init__(self, form: CallFormat, tools: Tools, sink: Sink, raw: str, name: str | None = None):
        """Begin behind a marker.

        Args:
            form: how calls are written.
            tools: the functions there are.
            sink: takes the call.
            raw: the marker, or the brace, that was read.
            name: the function's, where that is known and a JSON object of arguments is next.
        """
        self.raw, self.begun, self.done = [raw], False, False
        self._form, self._tools, self._sink = form, tools, sink
        self._name = name or ""
        self._whole = False  # whether nothing but ends of brackets can follow
        self._pushed: list[str] = []
        self._steps = self._read()
        next(self._steps)

    @classmethod
    def of_arguments(cls, name: str, tools: Tools, sink: Sink, raw: str) -> "CallReader":
        """A call whose arguments alone are next, as a JSON object."""
        return cls(CallFormat("", ""), tools, sink, raw, name)

    def add(self, character: str) -> str | None:
        """Read on.

        Returns:
            None: more is needed; else the text behind the call, which belongs to it no more.

        Raises:
            NotACallError: the text is none.
        """
        self.raw.append(character)
        if not self.begun and len(self.raw) > HEAD:
            raise NotACallError
        try:
            self._steps.send(character)
        except StopIteration as stop:
            self._complete()
            return stop.value
        return None

    def end(self) -> bool:
        """Whether the call was complete where the answer ended."""
        if self._whole and not self.done:
            self._complete()
        return self.done

    def _complete(self) -> None:
        self._sink.complete()
        self.done = True

    def _begin(self, name: str) -> None:
        if name not in self._tools:
            raise NotACallError
        self._name, self.begun = name, True
        self._sink.begin(name)

    def _read(self) -> Reading:
        form = self._form
        if form.name_key is not None:
            return (yield from self._object(form, bare=self.raw == ["{"] and not form.markers))
        head = self._name or (yield from self._head(form))
        if form.argument is not None:
            return (yield from self._tagged(head, form.argument, form.closers))
        if form.literal is not None:
            self._begin(head)
            yield from Literals(self._next, self._sink.argue, form.literal).read()
            self._whole = True
            return ""
        if (yield from self._behind_space()) != "{":
            raise NotACallError
        self._begin(head)
        yield from self._json_object()
        self._whole = True
        return ""

    def _next(self) -> Reading:
        if self._pushed:
            return self._pushed.pop(0)
        return (yield)  # pyright: ignore[reportReturnType]

    def _behind_space(self) -> Reading:
        while (character := (yield from self._next())).isspace():
            pass
        return character

    def _head(self, form: CallFormat) -> Reading:
        """The name of a call that stands before its arguments."""
        text = self.raw[0]
        while True:
            text += yield from self._next()
            heads = [head for head in form.heads if head.possible(text)]
            if not heads:
                raise NotACallError
            for head in heads:
                if (match := head.match(text)) is not None:
                    self._pushed += text[match.end() :]
                    return match["name"]

    # Calls that are JSON objects.

    def _object(self, form: CallFormat, bare: bool) -> Reading:
        if self.raw != ["{"]:
            while (character := (yield from self._behind_space())) == "[":
                pass
            if character != "{":
                raise NotACallError
        arguments = None
        character = yield from self._behind_space()
        while character != "}":
            if character != '"':
                raise NotACallError
            key = json.loads((yield from self._json('"')))
            if bare and key not in {form.name_key, form.arguments_key} | _OTHER_KEYS:
                raise NotACallError
            if (yield from self._behind_space()) != ":":
                raise NotACallError
            character = yield from self._behind_space()
            if key == form.name_key and not self.begun:
                name = json.loads((yield from self._json(character)) or "null")
                if name not in self._tools if isinstance(name, str) else True:
                    raise NotACallError
                self._name = name
            elif key == form.arguments_key or (form.name_key == "" and not self._name):
                self._name = self._name or (key if form.name_key == "" else "")
                arguments = yield from self._arguments(character)
            else:
                yield from self._json(character)
            character = yield from self._behind_space()
            if character == ",":
                character = yield from self._behind_space()
                if character != '"':
                    raise NotACallError
        self._finish(arguments)
        return ""

    def _arguments(self, character: str) -> Generator[None, str, str | None]:
        """Arguments as a value of the call's object; None: they were told as they came."""
        if character == "{" and self._name:
            self._begin(self._name)
            yield from self._json_object()
            self._whole = True
            return None
        text = yield from self._json(character)
        value = json.loads(text)
        if isinstance(value, str):  # encoded twice
            text = value
        return "{}" if value is None else _checked(text)

    def _finish(self, arguments: str | None) -> None:
        if not self.begun:
            self._begin(self._name)
            self._sink.argue(arguments or "{}")

    # JSON.

    def _json_object(self) -> Generator[None, str, None]:
        """A JSON object behind its brace, told as it comes."""
        self._sink.argue("{")
        _checked((yield from self._json("{", tell=True)))

    def _json(self, first: str, *, tell: bool = False) -> Reading:
        """A JSON value from its first character on; its brackets and strings alone are known to be right."""
        text, closing, string = [first], [], first == '"'
        closing += _CLOSING.get(first, "")
        while string or closing:
            character = yield from self._next()
            if tell:
                self._sink.argue(character)
            text.append(character)
            if string:
                if character == "\\":
                    text.append((yield from self._next()))
                    if tell:
                        self._sink.argue(text[-1])
                elif character == '"':
                    string = False
            elif character == '"':
                string = True
            elif character in _CLOSING:
                closing.append(_CLOSING[character])
            elif character in "]}" and closing.pop() != character:
                raise NotACallError
        if first not in '"{[':
            while (character := (yield from self._next())) not in ",]} \n\t\r":
                text.append(character)
            self._pushed.insert(0, character)
        value = "".join(text)
        try:
            json.loads(value)
        except ValueError:
            raise NotACallError from None
        return value

    # Arguments in tags.

    def _tagged(self, name: str, form: ArgumentFormat, closers: tuple[str, ...]) -> Reading:
        """Arguments each in its tags, told as a JSON object."""
        opening = re.compile(rf"{loose(form.before)}(?P<key>[^<>\"'=]+?)\s*(?P<between>{form.between})")
        fixed = "".join(form.before.split())
        count = 0
        while True:
            text = yield from self._behind_space()
            while (match := opening.fullmatch(text)) is None:
                if text in closers:
                    if not self.begun:
                        self._begin(name)
                    self._sink.argue("}" if count else "{}")
                    return ""
                bare = "".join(text.split())
                if not (
                    fixed.startswith(bare) or bare.startswith(fixed) or any(end.startswith(text) for end in closers)
                ):
                    raise NotACallError
                if len(text) > HEAD:
                    raise NotACallError
                text += yield from self._next()
            if not self.begun:
                self._begin(name)
            self._sink.argue(("{" if not count else ", ") + json.dumps(match["key"], ensure_ascii=False) + ": ")
            yield from self._value(match["key"], match["between"], form)
            count += 1

    def _value(self, key: str, between: str, form: ArgumentFormat) -> Generator[None, str, None]:
        types = self._tools.types(self._name, key)
        told = form.text_between is not None
        is_text = between == (form.text_between or "").rstrip("\n") if told else types == ("string",)
        tag = form.after.strip()
        ends = {tag, "\n" + tag} if form.after.startswith("\n") else {tag}
        held, value, first = "", [], True
        if is_text:
            self._sink.argue('"')
        while held not in ends:
            character = yield from self._next()
            if first and character == "\n" and form.after.startswith("\n"):
                first = False
                continue
            first = False
            held += character
            while held and not any(end.startswith(held) for end in ends):
                if is_text:
                    self._sink.argue(json.dumps(held[0], ensure_ascii=False)[1:-1])
                else:
                    value.append(held[0])
                held = held[1:]
        self._sink.argue('"' if is_text else _typed("".join(value), types))


_CLOSING = {"{": "}", "[": "]"}


def _checked(arguments: str) -> str:
    """Arguments that are a JSON object."""
    try:
        if isinstance(json.loads(arguments), dict):
            return arguments
    except ValueError:
        pass
    raise NotACallError


def _typed(text: str, types: tuple[str, ...]) -> str:
    """An argument's text as JSON: a number, a truth value, an object or a list if it is one, else a string."""
    word = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text.strip())
    try:
        value = json.loads(word)
    except ValueError:
        value = text
    return json.dumps(text if isinstance(value, str) or types == ("string",) else value, ensure_ascii=False)
