"""Incremental decoding of one answer: from its token ids to text that can be sent, up to a stop string.

What is sent ends where a token ends, so that text, ids and log-probabilities of an event belong together. Only the end
of the whole answer may lie within a token: a stop string may begin there.
"""

import bisect
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from fastjax.generation.stop_strings import StopStrings
from fastjax.generation.token_text import Part, token_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Stopped(NamedTuple):
    """How a stop string ended an answer.

    Attributes:
        stop: the string.
        tokens: those of the answer until the string was complete, the last of which may hold more.
    """

    stop: str
    tokens: int


class AnswerText(Protocol):
    """One answer's text while it grows; see `Detokenizer`, of which it has the methods and attributes."""

    tokens: int
    stopped: Stopped | None

    def add(self, tokens: Iterable[int]) -> str:
        """Text that can be sent now."""
        ...

    def finish(self) -> str:
        """The rest, when no token follows."""
        ...


class Detokenizer:
    """One answer's text. Without stop strings the parts joined are `tokenizer.decode(ids, skip_special_tokens=True)`.

    Spaces before punctuation stay, also where a tokenizer's `clean_up_tokenization_spaces` takes them away.
    Of several stop strings the match that begins first in the text wins, and of those that begin at one place the one
    that is complete first. A stop string may name special tokens, which the text leaves out.

    Attributes:
        tokens: of the answer, as far as their text was sent, in part at least: at the end those that belong to the
            returned text.
        stopped: how a stop string ended the answer; None so far.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", stop_strings: Sequence[str] = ()):
        """Begin an answer.

        Args:
            tokenizer: with a Rust backend; left as it is.
            stop_strings: texts before the first of which the answer ends.

        Raises:
            ConfigError: an empty stop string.
        """
        self.tokens = 0
        self.stopped: Stopped | None = None
        self._text = token_text(tokenizer)
        self._stops = StopStrings(stop_strings)
        self._held: list[str] = []  # characters; those of special tokens are empty
        self._sent = 0  # characters, those of special tokens included
        self._hidden = [(0, 0)]  # end of a special token's name, and the characters of all such names up to there

    def add(self, tokens: Iterable[int]) -> str:
        """Text that can be sent now: no half character, and nothing that could become a stop string.

        Args:
            tokens: the answer's next ids; after a stop they are passed by.
        """
        for token in tokens:
            if self.stopped is not None:
                break
            self._search(self._text.add(token))
        if self.stopped is not None:
            return self._send(self._stops.safe)
        starts, safe = self._text.starts, self._stops.safe
        return self._send(safe if safe == self._text.length else starts[bisect.bisect_right(starts, safe) - 1])

    def finish(self) -> str:
        """The text that was held back, when no token follows; empty after a stop."""
        if self.stopped is not None:
            return ""
        self._search(Part(self._text.finish()))
        if self.stopped is None:
            self._stops.finish()
            self._note()
        text = self._send(self._stops.safe)
        if self.stopped is None:
            self.tokens = len(self._text.starts)
        return text

    def offsets(self, tokens: slice) -> list[int]:
        """Places in the answer's text at which tokens begin, in characters.

        Args:
            tokens: of those whose text was sent.
        """
        found = []
        for start in self._text.starts[tokens]:
            place = bisect.bisect_right(self._hidden, start, key=lambda one: one[0])
            found.append(start - self._hidden[place - 1][1])
        return found

    def _search(self, part: Part) -> None:
        if not part.shown:
            self._hidden.append((self._text.length, self._hidden[-1][1] + len(part.text)))
        self._held += part.text if part.shown else [""] * len(part.text)
        self._stops.add(part.text)
        self._note()

    def _note(self) -> None:
        if self._stops.match is not None:
            count = bisect.bisect_left(self._text.starts, self._stops.match.end)
            self.stopped = Stopped(self._stops.match.stop, count)

    def _send(self, end: int) -> str:
        """The text up to a character."""
        count = end - self._sent
        text = "".join(self._held[:count])
        del self._held[:count]
        self._sent = end
        self.tokens = bisect.bisect_left(self._text.starts, end)
        return text
