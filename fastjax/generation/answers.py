"""Answers as they come from an engine: their tokens become text, and a stop string ends them."""

import dataclasses
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING

from fastjax.generation.choices import Piece
from fastjax.generation.detokenizer import AnswerText, Detokenizer
from fastjax.generation.engines import AnyEngine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclasses.dataclass(frozen=True)
class Answer:
    """An answer.

    Attributes:
        text: without special tokens; it ends before a stop string. Empty of a model without tokenizer.
        token_ids: those whose text is returned, in part at least; special tokens among them, but not the one that ended
            the answer.
        log_probs: log-probability of each, by the model's own logits.
        likeliest: (token id, log-probability) of the likeliest tokens in the place of each, best first, as many as
            `top_logprobs` asked for; empty without.
        finish_reason: "stop": at a stop token or a stop string; "length": at `max_new_tokens`; "cancelled".
        prompt_token_ids: the prompt's.
        stop: the stop string or the id of the stop token that ended it; None: neither.
        prompt_log_probs: of each of the prompt's tokens, None of the first; empty without `prompt_logprobs`.
        prompt_likeliest: as `likeliest`, of each of the prompt's tokens, nothing of the first.
    """

    text: str
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    likeliest: tuple[tuple[tuple[int, float], ...], ...]
    finish_reason: str
    prompt_token_ids: tuple[int, ...]
    stop: str | int | None = None
    prompt_log_probs: tuple[float | None, ...] = ()
    prompt_likeliest: tuple[tuple[tuple[int, float], ...], ...] = ()


class GrowingAnswer:
    """An answer while it is generated.

    Attributes:
        prompt_token_ids: the prompt's.
        token_ids: those generated so far, without a stop token, up to the one that completes a stop string.
        log_probs: of each; at the end further ones may follow, of tokens behind a stop string.
        likeliest: in the place of each, as `log_probs`.
        prompt_log_probs: as of `Answer`, from the first piece on.
        prompt_likeliest: as of `Answer`, from the first piece on.
        finish_reason: None while it goes on.
        stop: the stop string or the id of the stop token that ended it.
    """

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        stop_strings: Sequence[str] = (),
    ):
        """Begin.

        Args:
            prompt_token_ids: the prompt's.
            tokenizer: of the answer's text; None: it has none.
            stop_strings: that end it; they need a tokenizer.
        """
        self.prompt_token_ids = tuple(prompt_token_ids)
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop: str | int | None = None
        self._text: AnswerText | None = None if tokenizer is None else Detokenizer(tokenizer, stop_strings)
        self._sent: list[str] = []
        self.log_probs: list[float] = []
        self.likeliest: list[tuple[tuple[int, float], ...]] = []
        self.prompt_log_probs: tuple[float | None, ...] = ()
        self.prompt_likeliest: tuple[tuple[tuple[int, float], ...], ...] = ()

    def add(self, piece: Piece) -> str:
        """Take new tokens; after the end nothing happens.

        Args:
            piece: of this answer.

        Returns:
            Text that can be sent now.
        """
        if self.finish_reason is not None:
            return ""
        self.prompt_log_probs += piece.prompt_log_probs
        self.prompt_likeliest += piece.prompt_likeliest
        self.token_ids += piece.tokens
        self.log_probs += piece.log_probs
        self.likeliest += piece.likeliest
        text = ""
        if self._text is not None:
            text = self._text.add(piece.tokens)
            text += "" if piece.finish_reason is None else self._text.finish()
        if self._text is not None and self._text.stopped is not None:
            self.finish_reason, self.stop = "stop", self._text.stopped.stop
            del self.token_ids[self._text.stopped.tokens :]
        elif piece.finish_reason is not None:
            self.finish_reason, self.stop = piece.finish_reason, piece.stop_token
        self._sent.append(text)
        return text

    @property
    def kept(self) -> int:
        """The number of tokens whose text was given out, in part at least; without a tokenizer that of all."""
        return len(self.token_ids) if self._text is None else self._text.tokens

    def offsets(self, tokens: slice) -> list[int]:
        """Places in the text at which tokens begin, in characters; bytes of one character begin where it does.

        Args:
            tokens: of those whose text was given out, of an answer with a tokenizer.
        """
        return self._text.offsets(tokens) if isinstance(self._text, Detokenizer) else []

    def answer(self) -> Answer:
        """The answer, of one that has ended."""
        kept = self.kept
        return Answer(
            "".join(self._sent),
            tuple(self.token_ids[:kept]),
            tuple(self.log_probs[:kept]),
            tuple(self.likeliest[:kept]),
            self.finish_reason or "cancelled",
            self.prompt_token_ids,
            self.stop,
            self.prompt_log_probs,
            self.prompt_likeliest,
        )


def grown(engine: AnyEngine, answers: Mapping[int, Sequence[GrowingAnswer]]) -> Generator[tuple[GrowingAnswer, str]]:
    """Let an engine generate answers to their ends.

    Args:
        engine: that was asked for them, and for no others.
        answers: number of the request → its answers.

    Yields:
        An answer that has grown, and its new text. Closing the iterator cancels those that have not ended.
    """
    try:
        for piece in engine.run():
            one = answers[piece.request][piece.choice]
            if one.finish_reason is not None:
                continue
            text = one.add(piece)
            if one.finish_reason is not None and piece.finish_reason is None:
                engine.cancel(piece.request, piece.choice)
            yield one, text
    finally:
        for request, choices in answers.items():
            for choice, one in enumerate(choices):
                if one.finish_reason is None:
                    engine.cancel(request, choice)
