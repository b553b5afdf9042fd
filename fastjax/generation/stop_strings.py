"""The first stop string in a text that arrives in parts, and what of the text can be sent before it is known.

Each stop string has the automaton of Knuth, Morris and Pratt (SIAM J. Comput. 6, 1977): how many of its first
characters the text ends with. The longest of these beginnings is held back, so that nothing of a stop is ever sent. A
character costs the same, however long stop and text are.
"""

from collections.abc import Sequence
from typing import NamedTuple

from convert.errors import shown
from fastjax.errors import ConfigError


class Match(NamedTuple):
    """A stop string in the text.

    Attributes:
        stop: the string.
        start: its first character's place in the text.
        end: the place behind its last.
    """

    stop: str
    start: int
    end: int


class StopStrings:
    """A search for several strings.

    The match that begins first wins, and of those that begin at one place the one that is complete first, whatever the
    parts that the text comes in. So a match waits while another stop that began before it can still be completed.

    Attributes:
        match: the one that ends the text; None so far.
        safe: characters at the text's beginning that belong to no stop, whatever follows.
    """

    def __init__(self, stops: Sequence[str] = ()):
        """Begin with an empty text.

        Args:
            stops: strings.

        Raises:
            ConfigError: an empty string, or something else than strings.
        """
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            raise ConfigError(f"stop_strings: expected a list of texts that are not empty, got {shown(stops)}")
        self.match: Match | None = None
        self.safe = 0
        self._stops = [_Automaton(stop) for stop in dict.fromkeys(stops)]
        self._length = 0
        self._candidate: Match | None = None

    def add(self, text: str) -> None:
        """Read on; after a match nothing is read.

        Args:
            text: the next part.
        """
        if not self._stops:
            self._length += len(text)
            self.safe = self._length
            return
        for character in text:
            if self.match is not None:
                return
            self._read(character)

    def finish(self) -> None:
        """The text has ended: a match that waited counts, and stops that were begun do not."""
        self.match = self.match or self._candidate
        self.safe = self._length if self.match is None else self.match.start

    def _read(self, character: str) -> None:
        self._length += 1
        first = self._length
        for stop in self._stops:
            stop.read(character)
            first = min(first, self._length - stop.matched)
            start = self._length - len(stop.text)
            if stop.complete and (self._candidate is None or start < self._candidate.start):
                self._candidate = Match(stop.text, start, self._length)
        if self._candidate is not None and first >= self._candidate.start:
            self.match = self._candidate
            first = self._candidate.start
        self.safe = first


class _Automaton:
    """One string, and how many of its first characters the text ends with."""

    def __init__(self, text: str):
        self.text, self.matched, self.complete = text, 0, False
        self._back = [0]  # of so many characters: the longest shorter beginning that they end with
        for end in range(1, len(text)):
            self._back.append(self._next(self._back[-1], text[end]))

    def read(self, character: str) -> None:
        """Take the next character. After a match the search begins anew: no later one counts."""
        self.matched = self._next(0 if self.complete else self.matched, character)
        self.complete = self.matched == len(self.text)

    def _next(self, matched: int, character: str) -> int:
        while matched and self.text[matched] != character:
            matched = self._back[matched - 1]
        return matched + 1 if self.text[matched] == character else 0
