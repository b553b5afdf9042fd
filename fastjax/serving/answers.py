"""Answers of a request as they grow: the pieces of its ticket become text on the event loop."""

from collections.abc import AsyncIterator
from typing import NamedTuple

from fastjax.generation.answers import GrowingAnswer
from fastjax.generation.replies import ReplyParser
from fastjax.generation.replies.growing import GrowingReply
from fastjax.serving.requests import Request
from fastjax.serving.worker import Ticket, Wanted


class Growth(NamedTuple):
    """New text and tokens of an answer.

    Attributes:
        choice: its number among all of the request, of each prompt `n`.
        answer: it, so far.
        text: new text.
        tokens: the tokens whose text this is, as a slice of the answer's.
    """

    choice: int
    answer: GrowingAnswer
    text: str
    tokens: slice


class Answers:
    """The answers of a request.

    Attributes:
        request: the request.
        growing: the answers, in the order of their numbers.
    """

    def __init__(self, request: Request):
        """Begin.

        Args:
            request: of the client.
        """
        self.request = request
        self.growing = [_begun(request, one) for one in request.wanted for _ in range(one.options.n)]
        self._first = [0]
        for one in request.wanted:
            self._first.append(self._first[-1] + one.options.n)

    def prompt_of(self, choice: int) -> int:
        """The number of the prompt of an answer.

        Args:
            choice: the answer's.
        """
        return next(place for place, first in enumerate(self._first[1:]) if choice < first)

    async def grown(self, ticket: Ticket) -> AsyncIterator[Growth]:
        """Growths, until all have ended. Closing the iterator cancels those that have not.

        Args:
            ticket: of the request's prompts.

        Raises:
            EngineFailed: they will not end.
        """
        left, told = len(self.growing), [0] * len(self.growing)
        try:
            async for pieces in ticket.pieces():
                for place, piece in pieces:
                    choice = self._first[place] + piece.choice
                    one = self.growing[choice]
                    if one.finish_reason is not None:
                        continue
                    text = one.add(piece)
                    if one.finish_reason is not None:
                        left -= 1
                        if piece.finish_reason is None:
                            ticket.stop(place, piece.choice)
                    tokens, told[choice] = slice(told[choice], one.kept), one.kept
                    yield Growth(choice, one, text, tokens)
                if not left:
                    return
        finally:
            if left:
                ticket.cancel()

    def usage(self) -> dict[str, int]:
        """The tokens of prompts, each counted once, and of all answers."""
        prompt = sum(len(one.prompt) for one in self.request.wanted)
        answers = sum(one.kept for one in self.growing)
        return {"prompt_tokens": prompt, "completion_tokens": answers, "total_tokens": prompt + answers}


def _begun(request: Request, wanted: Wanted) -> GrowingAnswer:
    """An answer at its beginning."""
    model, stops = request.model, wanted.options.stop_strings
    if not request.chat:
        return GrowingAnswer(wanted.prompt, model.tokenizer, stops)
    parser = ReplyParser(model.replies, request.in_thought, request.tools)
    return GrowingReply(wanted.prompt, model.tokenizer, model.replies, parser, stops)
