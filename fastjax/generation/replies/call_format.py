"""The form of tool calls in a model's answers, as a chat template writes them."""

import dataclasses
import functools
import re

_TAG = re.compile(r"</?[^<>\s]*>?|\[/?[A-Z_]+\]|```(?:json)?")


@dataclasses.dataclass(frozen=True)
class ArgumentFormat:
    """How one argument is written where the arguments are no JSON object, as in `<parameter=KEY>VALUE</parameter>`.

    Attributes:
        before: the text before its name.
        between: the pattern of the text between its name and a value.
        text_between: the text there before a string, where that differs from other types'.
        after: the text behind its value.
    """

    before: str
    between: str
    text_between: str | None
    after: str


@dataclasses.dataclass(frozen=True)
class LiteralFormat:
    """How arguments are written as literals: `KEY='VALUE', KEY=5)` as in Python, `KEY:<|"|>VALUE<|"|>,KEY:5}`.

    Attributes:
        assign: the text between a name and its value.
        quote: the text around strings; one of a single character has Python's escapes.
        closing: the bracket behind the last one.
    """

    assign: str
    quote: str
    closing: str


@dataclasses.dataclass(frozen=True)
class CallFormat:
    """How calls are written.

    Attributes:
        opening: the text before the first call: a section's beginning, or a list's.
        before: the text of a call before its name, or before its JSON object.
        between: the text between its name and its arguments.
        closing: texts behind a call and behind all, which are no content.
        name_key: of a call that is one JSON object, the key of its name; "": the name is the key of the arguments;
            None: it is no such object.
        arguments_key: of such an object, the key of its arguments.
        argument: of arguments in tags, how each is written.
        literal: of arguments that are literals, how they are written.
        follows: whether further calls follow behind a comma, without the text before the first.
    """

    opening: str
    before: str
    between: str = ""
    closing: tuple[str, ...] = ()
    name_key: str | None = None
    arguments_key: str = ""
    argument: ArgumentFormat | None = None
    literal: LiteralFormat | None = None
    follows: bool = False

    @functools.cached_property
    def markers(self) -> tuple[str, ...]:
        """Texts with which calls begin; empty where a JSON object does by itself."""
        found = (re.match(r"\s*([^\s{]+)", text) for text in (self.opening, self.before))
        texts = [_TAG.match(each[1]) for each in found if each]
        return tuple(dict.fromkeys(tag[0] for tag in texts if tag and len(tag[0]) > 1))

    @functools.cached_property
    def closers(self) -> tuple[str, ...]:
        """Texts that end calls."""
        tags = (tag[0] for text in self.closing for tag in _TAG.finditer(text))
        return tuple(dict.fromkeys(tag for tag in tags if len(tag) > 1 and tag not in self.markers))

    @functools.cached_property
    def heads(self) -> tuple["Head", ...]:
        """Beginnings of a call whose name stands before its arguments: with what opens all of them, and without."""
        texts = [self.opening + self.before, self.before] if self.opening.strip() else [self.before]
        return tuple(Head(text, self.between) for text in [*texts, *[""] * self.follows])


class Head:
    """The text of a call up to its arguments, whatever its white space and its numbers are."""

    def __init__(self, before: str, between: str):
        """Take the text before the name and that behind it."""
        self._fixed = "".join(re.split(r"\d", before)[0].split())
        end = between.strip()
        self._pattern = re.compile(
            rf"\s*{loose(before)}(?P<name>[^\s<>{{}}\[\]\"'=()]+?)\s*" + (rf"{loose(end)}" if end else r"(?=[\s<{])")
        )
        self._last = end[-1:] or ""

    def possible(self, text: str) -> bool:
        """Whether a text may be the beginning of one."""
        bare = "".join(text.split())
        return self._fixed.startswith(bare) or bare.startswith(self._fixed)

    def match(self, text: str) -> re.Match[str] | None:
        """The whole head in a text that ends with it."""
        if self._last and not text.endswith(self._last):
            return None
        return self._pattern.match(text)


def loose(text: str) -> str:
    """A pattern of a text whose white space may be otherwise, and whose numbers and probes of ids too."""
    parts = re.split(r"(\s+|\d+)", text)
    return "".join(
        r"\s*" if part.isspace() else r"[\w.:-]*" if part.isdigit() else re.escape(part) for part in parts if part
    )
