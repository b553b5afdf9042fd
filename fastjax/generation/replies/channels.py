"""Replies in harmony's channels (github.com/openai/harmony): messages, each with a header before its text.

"analysis" is reasoning, "final" and "commentary" are content, and a message to `functions.NAME` is a call.
"""

import re

from fastjax.generation.replies.calls import CallReader
from fastjax.generation.replies.format import CHANNEL_MARKERS, ReplyFormat
from fastjax.generation.replies.markers import Markers
from fastjax.generation.replies.not_a_call import NotACallError
from fastjax.generation.replies.sink import Sink, Tools

_START, _CHANNEL, _CONSTRAIN, _MESSAGE, *_ENDS = CHANNEL_MARKERS
_RECIPIENT = re.compile(r"to=(\S+)")
HEADER = 512
"""Characters of a header, at most."""


class ChannelReader:
    """A reply whose parts are messages."""

    def __init__(self, form: ReplyFormat, begins_in_thought: bool, tools: Tools, sink: Sink):
        """Begin; see `ReplyParser`."""
        del form
        self._tools, self._sink = tools, sink
        self._heads = Markers((_MESSAGE, *_ENDS))
        self._bodies = Markers((*_ENDS, _START, _CHANNEL))
        self._text, self._header = "", ""
        self._state = "reasoning" if begins_in_thought else "header"
        self._first = not begins_in_thought
        self._call: CallReader | None = None

    @property
    def held(self) -> int:
        """See `ReplyParser`."""
        call = 0 if self._call is None or self._call.begun else len(self._call.raw)
        return len(self._text) + len(self._header) + call

    def feed(self, text: str) -> None:
        """Read on."""
        self._text += text
        while self._text and self._step():
            pass

    def end(self, cut: bool) -> None:
        """Read what was held back; `cut`: the answer was cut there."""
        if self._call is not None:
            if not self._call.end() and not cut:
                self._sink.say("content", "".join(self._call.raw))
        elif self._state == "header":
            if not cut and not self._parts(self._header + self._text):
                self._sink.say("content", self._header + self._text)
        elif self._state in ("reasoning", "content") and not (cut and len(self._text) > 2):
            self._sink.say(self._state, self._text)

    def _step(self) -> bool:
        if self._state == "header":
            return self._read_header()
        text, marker, self._text = self._bodies.find(self._text)
        self._take(text)
        if marker is None:
            return False
        if self._call is not None and not self._call.end():
            self._sink.say("content", "".join(self._call.raw))
        self._call, self._state, self._header = None, "header", marker if marker in (_START, _CHANNEL) else ""
        return True

    def _read_header(self) -> bool:
        text, marker, self._text = self._heads.find(self._text)
        self._header += text
        unlike = self._first and bool(self._header.strip()) and not self._parts(self._header)
        if unlike or len(self._header) > HEADER:  # an answer without a header
            said = "" if unlike else self._header[:HEADER]
            self._sink.say("content", said)
            self._text = self._header[len(said) :] + (marker or "") + self._text
            self._header, self._state, self._first = "", "content", False
            return True
        if marker in _ENDS:
            self._header = ""
            return True
        if marker is None:
            return False
        header, self._header, self._first = self._header, "", False
        recipient = _RECIPIENT.search(header)
        if recipient is not None and recipient[1].startswith("functions."):
            name = recipient[1].removeprefix("functions.").split("<")[0]
            self._call, self._state = CallReader.of_arguments(name, self._tools, self._sink, header + _MESSAGE), "call"
        else:
            self._state = "reasoning" if "analysis" in header else "content"
        return True

    def _parts(self, header: str) -> bool:
        """Whether a text may be a header's beginning."""
        bare = header.lstrip()
        return any(bare.startswith(begin) or begin.startswith(bare) for begin in (_START, _CHANNEL, "to=", "assistant"))

    def _take(self, text: str) -> None:
        if self._call is None:
            if self._state != "behind":
                self._sink.say(self._state, text)
            return
        for place, character in enumerate(text):
            try:
                behind = self._call.add(character)
            except NotACallError:
                self._sink.say("content", "".join(self._call.raw) + text[place + 1 :])
                self._call, self._state = None, "content"
                return
            if behind is not None:
                self._call, self._state = None, "behind"
                return
