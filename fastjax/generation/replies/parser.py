"""A reply's reasoning, content and calls, told apart while its text comes in parts.

The reply is the same for every cut of the text into parts. What may become a marker, and the beginning of a call up to
its name, is held back; all else is told at once. An event costs the same, however long the text before it is.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from fastjax.generation.replies.calls import CallReader
from fastjax.generation.replies.channels import ChannelReader
from fastjax.generation.replies.format import ReplyFormat
from fastjax.generation.replies.markers import Markers
from fastjax.generation.replies.not_a_call import NotACallError
from fastjax.generation.replies.reply import Delta, Reply
from fastjax.generation.replies.sink import Sink, Tools

SPACE = 64
"""Characters of white space that are held back, since they may stand between two parts of a reply."""


class _Reader(Protocol):
    """Takes the text of a reply."""

    @property
    def held(self) -> int: ...

    def feed(self, text: str) -> None: ...

    def end(self, cut: bool) -> None: ...


class ReplyParser:
    """A reply that is read."""

    def __init__(
        self,
        form: ReplyFormat,
        begins_in_thought: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
    ):
        """Begin.

        Args:
            form: how the model writes replies.
            begins_in_thought: whether the prompt ends within the reasoning; see `ReplyFormat.begins_in_thought`.
            tools: the functions that may be called, as the chat template takes them; calls of others, and all calls
                without any, are content.
        """
        self._sink = Sink()
        reader = ChannelReader if form.channels else _TagReader
        self._reader: _Reader = reader(form, begins_in_thought, Tools(tools), self._sink)

    @property
    def held(self) -> int:
        """Characters at the end of the text so far that are held back."""
        return self._reader.held

    def feed(self, text: str) -> list[Delta]:
        """Read on.

        Args:
            text: the next part, with the names of those special tokens that `ReplyFormat.parts_reply` takes.

        Returns:
            What is certain by now, behind that of the calls before.
        """
        self._reader.feed(text)
        return self._sink.taken()

    def end(self, finish_reason: str = "stop") -> list[Delta]:
        """The rest, when no text follows.

        Args:
            finish_reason: "stop": what was held back is content, a call that was begun included; else the answer was
                cut, and such a call is left out.
        """
        self._reader.end(finish_reason != "stop")
        return self._sink.taken()

    def reply(self) -> Reply:
        """The reply so far, with its complete calls."""
        return self._sink.reply()


class _TagReader:
    """A reply whose parts stand in tags."""

    def __init__(self, form: ReplyFormat, begins_in_thought: bool, tools: Tools, sink: Sink):
        self._tools, self._sink = tools, sink
        self._calls = form.calls if tools else None
        self._thought = form.reasoning
        openings = () if self._thought is None else (self._thought[0],)
        closings = () if self._thought is None else (self._thought[1],)
        markers = () if self._calls is None else self._calls.markers
        self._bare = self._calls is not None and not markers
        brace = ("{",) if self._bare else ()
        self._in_thought, self._in_content = Markers(closings), Markers((*markers, *brace))
        self._at_start = Markers((*markers, *openings, *brace))
        self._text, self._space = "", ""
        self._state = "reasoning" if begins_in_thought else "content"
        self._strip = begins_in_thought  # whether white space is left out until something is said
        self._call: CallReader | None = None
        self._line = True  # whether nothing but white space stands in the content's line

    @property
    def held(self) -> int:
        call = 0 if self._call is None or self._call.begun else len(self._call.raw)
        return len(self._text) + len(self._space) + call

    def feed(self, text: str) -> None:
        self._text += text
        while self._step():
            pass

    def end(self, cut: bool) -> None:
        if self._call is not None:
            if not self._call.end() and not cut:
                self._sink.say("content", self._space + "".join(self._call.raw))
            return
        if self._state == "behind":
            return
        marker = (self._in_thought if self._state == "reasoning" else self._at_start).begins(self._text)
        if cut and len(self._text) > 2 and marker:
            self._text = ""
        self._say(self._text, "reasoning" if self._state == "reasoning" else "content")
        if self._state == "content":
            self._sink.say("content", self._space)

    def _step(self) -> bool:
        """Take a part of the text; False: nothing more can be taken."""
        if not self._text:
            return False
        if self._call is not None:
            return self._read_call(self._call)
        if self._state == "behind":
            return self._between_calls()
        if self._state == "reasoning":
            text, marker, self._text = self._in_thought.find(self._text)
            self._say(text, "reasoning")
            if marker is not None:
                self._state, self._space, self._strip = "content", "", True
            return marker is not None
        return self._content()

    def _content(self) -> bool:
        markers = self._in_content if self._sink.said("content") else self._at_start
        text, marker, self._text = markers.find(self._text)
        blank = not text.strip()
        self._say(text, "content")
        if marker is None:
            # Content that was said now takes the thought's opening from the markers.
            return markers is self._at_start and not blank and bool(self._text)
        if self._thought is not None and marker == self._thought[0]:
            if self._sink.said("content"):
                self._say(marker, "content")
            else:
                self._state, self._space, self._strip = "reasoning", "", True
        elif marker == "{" and self._bare and not self._line:
            self._say(marker, "content")
        else:
            assert self._calls is not None
            self._call = CallReader(self._calls, self._tools, self._sink, marker)
        return True

    def _read_call(self, call: CallReader) -> bool:
        for place, character in enumerate(self._text):
            try:
                behind = call.add(character)
            except NotACallError:
                self._no_call(call, self._text[place + 1 :])
                return True
            if behind is not None:
                self._text = behind + self._text[place + 1 :]
                self._state, self._call, self._space, self._strip = "behind", None, "", True
                return True
        self._text = ""
        return False

    def _no_call(self, call: CallReader, rest: str) -> None:
        """Take a text that was no call for content; what stands in it may be one, if it is short."""
        raw = "".join(call.raw)
        self._call = None
        again = 1 if not call.begun and len(raw) < HEAD_AGAIN else len(raw)
        self._say(raw[:again], "content")
        self._text = raw[again:] + rest

    def _between_calls(self) -> bool:
        """Leave out what ends calls, up to the next one or the content behind them."""
        assert self._calls is not None
        listed, follows = self._calls.name_key is not None, self._calls.follows
        text = self._text.lstrip(" \n\r\t,;]" if listed or follows else " \n\r\t")
        self._text = text
        if not text:
            return False
        if (listed and text[0] == "{") or (follows and text[0].isidentifier()):
            self._call, self._text = CallReader(self._calls, self._tools, self._sink, text[0]), text[1:]
            return True
        ends = sorted((*self._calls.markers, *self._calls.closers), key=len, reverse=True)
        if any(len(text) < len(end) and end.startswith(text) for end in ends):
            return False
        end = next((end for end in ends if text.startswith(end)), None)
        if end is None or end in self._calls.markers:
            self._state, self._line = "content", True
            return True
        self._text = text[len(end) :]
        return True

    def _say(self, text: str, kind: str) -> None:
        """Add text, but for white space at its end, which is left out where another part of the reply follows."""
        text = self._space + text
        if self._strip:
            text = text.lstrip()
        if not text:
            self._space = ""
            return
        self._strip = False
        said = text.rstrip()
        space = text[len(said) :]
        keeps = kind == "reasoning" or self._calls is not None or not (said or self._sink.said("content"))
        self._space = space[max(0, len(space) - SPACE) :] if keeps else ""
        told = text[: len(text) - len(self._space)]
        self._sink.say(kind, told)
        if kind == "content":
            line = text.rpartition("\n")[2]
            self._line = not line.strip() if "\n" in text else self._line and not line.strip()


HEAD_AGAIN = 512
"""Characters of a text that was no call, at most, where those behind its first are searched for calls again."""
