"""Arguments of a call as literals, as Gemma 4 and, in Python's, LFM 2 write them; told as JSON while they come."""

import ast
import json
from collections.abc import Callable, Generator

from fastjax.generation.replies.call_format import LiteralFormat
from fastjax.generation.replies.not_a_call import NotACallError

Reading = Generator[None, str, str]
"""Takes characters; returns the one behind what was read."""

_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
WORD = 512
"""Characters of a name, or of a value without quotes, at most."""


class Literals:
    """Arguments that are read."""

    def __init__(self, following: Callable[[], Reading], tell: Callable[[str], None], form: LiteralFormat):
        """Begin behind the opening bracket.

        Args:
            following: reads the next character.
            tell: takes text of the JSON object.
            form: how arguments are written.
        """
        self._following, self._tell, self._form = following, tell, form
        self._pushed: list[str] = []

    def read(self) -> Generator[None, str, None]:
        """Read up to the closing bracket.

        Raises:
            NotACallError: no such arguments.
        """
        yield from self._entries(self._form.assign, self._form.closing)

    def _entries(self, assign: str, closing: str) -> Generator[None, str, None]:
        """Names and values, told as an object."""
        self._tell("{")
        count = 0
        while (character := (yield from self._behind_space())) != closing:
            if count and character != ",":
                raise NotACallError
            if count:
                character = yield from self._behind_space()
                if character == closing:
                    break
            self._tell(", " if count else "")
            yield from self._name(character, assign)
            self._tell(": ")
            yield from self._value((yield from self._behind_space()))
            count += 1
        self._tell("}")

    def _name(self, character: str, assign: str) -> Generator[None, str, None]:
        if character in "'\"" or character == self._form.quote[0]:
            yield from self._text(character)
            if (yield from self._behind_space()) != assign:
                raise NotACallError
            return
        name = character
        while not name.endswith(assign):
            name += yield from self._next()
            if len(name) > WORD:
                raise NotACallError
        self._tell(json.dumps(name[: -len(assign)].strip(), ensure_ascii=False))

    def _value(self, character: str) -> Generator[None, str, None]:
        if character == "{":
            yield from self._entries(":", "}")
        elif character == "[":
            yield from self._list()
        elif character in "'\"" or character == self._form.quote[0]:
            yield from self._text(character)
        else:
            yield from self._word(character)

    def _list(self) -> Generator[None, str, None]:
        self._tell("[")
        count = 0
        while (character := (yield from self._behind_space())) != "]":
            if count and character != ",":
                raise NotACallError
            if count:
                character = yield from self._behind_space()
                if character == "]":
                    break
            self._tell(", " if count else "")
            yield from self._value(character)
            count += 1
        self._tell("]")

    def _text(self, character: str) -> Generator[None, str, None]:
        quote = character if character in "'\"" else self._form.quote
        for expected in quote[1:]:
            if (yield from self._next()) != expected:
                raise NotACallError
        self._tell('"')
        held = ""
        while held != quote:
            held += yield from self._next()
            if held == "\\" and len(quote) == 1:
                self._tell(json.dumps((yield from self._escaped()), ensure_ascii=False)[1:-1])
                held = ""
            while held and not quote.startswith(held):
                self._tell(json.dumps(held[0], ensure_ascii=False)[1:-1])
                held = held[1:]
        self._tell('"')

    def _escaped(self) -> Reading:
        """The character of an escape in Python's strings, behind its backslash."""
        text = yield from self._next()
        for _ in range({"x": 2, "u": 4, "U": 8}.get(text, 0)):
            text += yield from self._next()
        if text == "\n":
            return ""
        try:
            return str(ast.literal_eval(f'"\\{text}"')) if text[0] in "xuUnrtabfv0'\"\\" else f"\\{text}"
        except (SyntaxError, ValueError):
            raise NotACallError from None

    def _word(self, character: str) -> Generator[None, str, None]:
        """A number, or a word without quotes."""
        word = ""
        while character not in ",)]}":
            word += character
            if len(word) > WORD:
                raise NotACallError
            character = yield from self._next()
        self._pushed.append(character)
        word = word.strip()
        if not word:
            raise NotACallError
        try:
            value = _WORDS[word] if word in _WORDS else json.loads(word)
        except ValueError:
            value = word
        self._tell(json.dumps(value, ensure_ascii=False))

    def _next(self) -> Reading:
        return self._pushed.pop() if self._pushed else (yield from self._following())

    def _behind_space(self) -> Reading:
        while (character := (yield from self._next())).isspace():
            pass
        return character
