"""Ends of turns in a chat template's texts, found with a probe in the content's place."""

import functools
import os
import re
from collections.abc import Callable, Collection, Sequence

from fastjax.data.records import Message
from fastjax.data.special_texts import any_of
from fastjax.errors import DataError

PROBE = "\ufdd0content\ufdd1"
"""Content in another's place; the two are no characters of a text."""

_QUESTION: Message = {"role": "user", "content": "a"}
_SAID: Message = {"role": "assistant", "content": PROBE}


class Turns:
    """The way in which a template ends its turns."""

    def __init__(self, render: Callable[[Sequence[Message]], str], special: Collection[str], added: Collection[str]):
        """Take a template.

        Args:
            render: Renders messages as text.
            special: Texts of all special tokens.
            added: Texts of other added tokens.
        """
        self._render = render
        self._special = [token for token in special if token]
        self._added = [token for token in added if token.strip()]

    @functools.cached_property
    def ends(self) -> frozenset[str]:
        """Texts of the tokens that may end a turn: all special ones, and added ones that stand behind an answer."""
        ends, token = set(self._special), any_of(self._added)
        call = {"type": "function", "function": {"name": "b", "arguments": {"c": PROBE}}}
        for chat in ([_QUESTION, _SAID], [_QUESTION, _SAID, _QUESTION]) if self._added else ():
            ends |= set(token.findall(self._behind(chat))[:1])
        if ends > set(self._special):
            ends |= set(token.findall(self._behind([_QUESTION, {**_SAID, "content": "", "tool_calls": [call]}]))[-1:])
        return frozenset(ends)

    @functools.cached_property
    def end(self) -> re.Pattern[str]:
        """Matches one of the ends."""
        return any_of(self.ends)

    @functools.cached_property
    def closing(self) -> str:
        """Text that the template writes behind the last answer's turn alone, such as Phi-3's EOS.

        Generation stops at the end of the turn, so this is not learnt.
        """
        chat = [_QUESTION, _SAID]
        last, inner = (self._behind(chat + more) for more in ([], chat[:1]))
        common = os.path.commonprefix([last, inner])
        ends = [match.end() for match in self.end.finditer(common)]
        return last[ends[-1] :] if ends and last[ends[-1] :].strip() else ""

    @functools.cached_property
    def rewrites(self) -> bool:
        """Whether the template rewrites a conversation with thoughts when messages follow; few marked ones do."""
        thoughts = ({"content": "<think>\nb\n</think>\n\nc"}, {"content": "c", "reasoning_content": "b"})
        for said in thoughts:
            chat = [_QUESTION, {"role": "assistant", **said}]
            try:
                through, whole = self._render(chat), self._render(chat * 2)
            except DataError:
                return True  # it is not known
            if self.last(through, whole)[1] is None:
                return True
        return False

    def last(self, through: str, text: str) -> tuple[int, int | None]:
        """The end of a conversation's last turn.

        Args:
            through: The conversation's text.
            text: The text of a conversation that goes on from it.

        Returns:
            The place in the first text, and in the second; None: that has the turn otherwise.
        """
        core, end, behind = self.core(through)
        length = len(core) + len(end) + len(behind)
        if not text.startswith(core):
            return length, None
        place = len(core)
        if end:
            match = self.end.match(text, place)
            if match is None:
                return length, None
            place = match.end()
        return length, place + (len(behind) if text.startswith(behind, place) else 0)

    def core(self, text: str) -> tuple[str, str, str]:
        """A conversation without the end of its last turn, that end's token ("": it has none), and the space behind.

        Args:
            text: The conversation's.
        """
        body = text.removesuffix(self.closing)
        said = body.rstrip()
        begin = max(0, len(said) - self._longest)
        end = next((match for match in self.end.finditer(said, begin) if match.end() == len(said)), None)
        return (body, "", "") if end is None else (said[: end.start()], end.group(), body[len(said) :])

    def undivided(self, place: int, *texts: str) -> int:
        """A place in texts that are the same up to it, moved before a token that it divides.

        Args:
            place: Number of characters.
            texts: The texts.
        """
        for text in texts:
            tokens = self.end.finditer(text, max(0, place - self._longest), place + self._longest)
            place = next((token.start() for token in tokens if token.start() < place < token.end()), place)
        return place

    @functools.cached_property
    def _longest(self) -> int:
        return max(map(len, self.ends), default=0)

    def _behind(self, chat: Sequence[Message]) -> str:
        """The text behind the probe in a conversation; "" where the template refuses it."""
        try:
            return self._render(chat).rpartition(PROBE)[2]
        except DataError:
            return ""
