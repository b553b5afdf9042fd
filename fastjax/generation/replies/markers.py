"""The first of several markers in a text that comes in parts."""

import re
from collections.abc import Collection
from typing import NamedTuple


class Found(NamedTuple):
    """A part of a text.

    Attributes:
        text: before the marker, or all that holds no part of one.
        marker: the marker; None: there is none.
        rest: behind the marker, or the end of the text that may become one.
    """

    text: str
    marker: str | None
    rest: str


class Markers:
    """A search for markers; of those that begin at one place the longest counts, whatever the parts."""

    def __init__(self, markers: Collection[str]):
        """Take the markers."""
        self._markers = sorted({marker for marker in markers if marker}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._markers)) or r"(?!)")
        self._longest = max(map(len, self._markers), default=0)

    def find(self, text: str) -> Found:
        """Search a text.

        Args:
            text: the rest of the last part that held no marker, and the next part.
        """
        match = self._pattern.search(text)
        first = len(text) if match is None else match.start()
        for place in range(max(0, len(text) - self._longest + 1), first + (match is not None)):
            if self.begins(text[place:]):
                return Found(text[:place], None, text[place:])
        if match is None:
            return Found(text, None, "")
        return Found(text[:first], match[0], text[match.end() :])

    def begins(self, text: str) -> bool:
        """Whether a text is the beginning of a marker, and not all of it."""
        return any(len(text) < len(marker) and marker.startswith(text) for marker in self._markers)
