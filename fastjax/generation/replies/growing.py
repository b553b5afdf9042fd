"""A reply while its tokens are generated: deltas that belong to whole tokens, and stop strings in its content alone."""

import bisect
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from fastjax.generation.answers import GrowingAnswer
from fastjax.generation.choices import Piece
from fastjax.generation.detokenizer import Stopped
from fastjax.generation.replies.format import ReplyFormat
from fastjax.generation.replies.parser import ReplyParser
from fastjax.generation.replies.reply import Delta, Reply
from fastjax.generation.stop_strings import StopStrings
from fastjax.generation.token_text import Part, token_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class GrowingReply(GrowingAnswer):
    """An answer while it is generated, with its reasoning, content and calls apart.

    `add` returns the new content, and the text of `answer()` is the content.
    """

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        tokenizer: "PreTrainedTokenizerBase",
        form: ReplyFormat,
        parser: ReplyParser,
        stop_strings: Sequence[str] = (),
    ):
        """Begin.

        Args:
            prompt_token_ids: the prompt's.
            tokenizer: of the answer's text.
            form: how the model writes replies.
            parser: a new one of that format.
            stop_strings: that end it, where they stand in its content.
        """
        super().__init__(prompt_token_ids)
        self._reply = ReplyText(tokenizer, form, parser, stop_strings)
        self._text = self._reply

    def add(self, piece: Piece) -> str:
        """Take new tokens; after the end nothing happens.

        Args:
            piece: of this answer.

        Returns:
            New content.
        """
        self._reply.finish_reason = piece.finish_reason or "stop"
        return super().add(piece)

    @property
    def sent(self) -> int:
        """Tokens whose text the deltas so far hold."""
        return self._reply.tokens

    def deltas(self) -> list[Delta]:
        """The deltas since the last call."""
        return self._reply.taken()

    def reply(self) -> Reply:
        """The reply so far."""
        return self._reply.reply()


class ReplyText:
    """The text of one reply; as a `Detokenizer` it gives the content.

    Attributes:
        tokens: those whose text was given out, whole.
        stopped: how a stop string ended the reply; None so far.
        finish_reason: of the answer, where it ends with the next tokens.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        form: ReplyFormat,
        parser: ReplyParser,
        stop_strings: Sequence[str] = (),
    ):
        """Begin; see `GrowingReply`."""
        self.tokens = 0
        self.stopped: Stopped | None = None
        self.finish_reason = "stop"
        self._text = token_text(tokenizer)
        self._form, self._parser, self._stop_strings = form, parser, stop_strings
        self._stops = StopStrings(stop_strings)
        self._held: list[str] = []  # content that may belong to a stop string; special tokens' characters are empty
        self._waiting: list[Delta] = []  # deltas that were not given out
        self._out: list[Delta] = []
        self._content: list[str] = []
        self._calls: set[str] = set()
        self._searched, self._end = 0, 0

    def add(self, tokens: Iterable[int]) -> str:
        """New content that can be told now.

        Args:
            tokens: the reply's next ids; after a stop they are passed by.
        """
        together: list[str] = []  # text is read at once where no stop string can part it
        for token in tokens:
            if self.stopped is not None:
                break
            part = self._text.add(token)
            if part.shown and not self._stop_strings:
                together.append(part.text)
                continue
            self._take(Part("".join(together)))
            self._take(part)
            together = []
        self._take(Part("".join(together)))
        return self._release()

    def finish(self) -> str:
        """The content that was held back, when no token follows."""
        if self.stopped is not None:
            return ""
        self._take(Part(self._text.finish()))
        if self.stopped is None:
            self._keep(self._parser.end(self.finish_reason))
        if self.stopped is None:
            self._flush()
        if self.stopped is not None:
            return self._release()
        return self._release(every=True)

    def taken(self) -> list[Delta]:
        """The deltas since the last call."""
        deltas, self._out = self._out, []
        return deltas

    def reply(self) -> Reply:
        """The reply so far."""
        whole = self._parser.reply()
        calls = tuple(call for call in whole.tool_calls if call.id in self._calls)
        return Reply(whole.reasoning, "".join(self._content), calls)

    def _take(self, part: Part) -> None:
        if not part.text:
            return
        if part.shown or self._form.parts_reply(part.text):
            self._keep(self._parser.feed(part.text))
        elif self._stop_strings and not self._parser.held:
            self._search(part.text, shown=False)

    def _keep(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            if self.stopped is not None:
                return
            if delta.kind == "content":
                self._search(delta.text, shown=True)
            else:
                self._flush()
                if self.stopped is None:
                    self._waiting.append(delta)

    def _search(self, text: str, *, shown: bool) -> None:
        self._held += text if shown else [""] * len(text)
        self._searched += len(text)
        self._stops.add(text)
        self._note()

    def _flush(self) -> None:
        """Let content go that waited for a stop string: something else follows."""
        self._stops.finish()
        self._note()
        if self.stopped is None:
            self._stops, self._searched = StopStrings(self._stop_strings), 0

    def _note(self) -> None:
        """Pass content on, up to a stop string or what may become one."""
        behind = self._searched - self._stops.safe
        count = len(self._held) - behind
        text = "".join(self._held[:count])
        del self._held[:count]
        if text:
            self._waiting.append(Delta("content", text))
        if self._stops.match is not None:
            self.stopped = Stopped(self._stops.match.stop, len(self._text.starts))
            self._end = bisect.bisect_left(self._text.starts, self._text.length - self._parser.held - behind)

    def _release(self, *, every: bool = False) -> str:
        """Give out the deltas, but for the text of a token of which a part is held back."""
        starts, behind = self._text.starts, self._parser.held + self._searched - self._stops.safe
        back = 0
        if every or self.stopped is not None:
            self.tokens = len(starts) if self.stopped is None else self._end
        else:
            safe = self._text.length - behind
            place = safe if not behind else starts[bisect.bisect_right(starts, safe) - 1]
            self.tokens, back = bisect.bisect_left(starts, place), safe - place
        deltas, self._waiting = self._waiting, []
        if back and deltas and deltas[-1].kind != "tool_call":
            last = deltas.pop()
            place = max(0, len(last.text) - back)
            deltas += [last._replace(text=last.text[:place])] if place else []
            self._waiting = [last._replace(text=last.text[place:])]
        self._out += deltas
        self._calls |= {delta.id for delta in deltas if delta.id is not None}
        text = "".join(delta.text for delta in deltas if delta.kind == "content")
        self._content.append(text)
        return text
