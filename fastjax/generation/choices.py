"""Answers on the host: what is asked, and what comes of it."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from convert.errors import shown
from fastjax.errors import ConfigError
from fastjax.generation.adapters import NO_ADAPTER
from fastjax.generation.options import GenerationOptions


@dataclasses.dataclass(frozen=True)
class Piece:
    """New tokens of an answer.

    Attributes:
        request: number of the request.
        choice: number of the answer among the request's.
        tokens: the tokens, without the one that ends the answer.
        log_probs: log-probability of each, by the model's own logits: before bias, penalties, temperature and filters.
        likeliest: (token, log-probability) of the likeliest tokens in the place of each, from the best on; empty where
            none were asked for.
        finish_reason: "stop", "length" or "cancelled"; None: the answer goes on.
        stop_token: the token that ended it, or None.
        prompt_log_probs: of an answer's first piece, with `prompt_logprobs`: log-probability of each of the prompt's
            tokens, None of the first; else empty.
        prompt_likeliest: as `likeliest`, of each of the prompt's tokens, nothing of the first.
    """

    request: int
    choice: int
    tokens: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    likeliest: tuple[tuple[tuple[int, float], ...], ...] = ()
    finish_reason: str | None = None
    stop_token: int | None = None
    prompt_log_probs: tuple[float | None, ...] = ()
    prompt_likeliest: tuple[tuple[tuple[int, float], ...], ...] = ()

    def numbered(self, request: int) -> "Piece":
        """The piece of a request that has another number elsewhere."""
        return dataclasses.replace(self, request=request)


class PromptTold(NamedTuple):
    """Log-probabilities of a prompt's tokens, as a `Piece` has them."""

    log_probs: tuple[float | None, ...] = ()
    likeliest: tuple[tuple[tuple[int, float], ...], ...] = ()


@dataclasses.dataclass(eq=False)
class Choice:
    """An answer on the host: it waits, or has a row.

    Attributes:
        request: number of its request.
        number: its own among the request's.
        prompt: token ids.
        options: the request's.
        adapter: number of its adapter; -1: none.
        source: the answer whose prompt's pages it shares, or None.
        row: its row; -1: none yet.
        pages: its pages.
        entered: tokens of the prompt that are in the cache.
        answered: tokens of the answer so far.
        begun: as many and those that the device has been asked for.
        told: of the prompt's tokens so far.
    """

    request: int
    number: int
    prompt: np.ndarray
    options: GenerationOptions
    adapter: int = NO_ADAPTER
    source: "Choice | None" = None
    row: int = -1
    pages: list[int] = dataclasses.field(default_factory=list)
    entered: int = 0
    answered: int = 0
    begun: int = 0
    told: PromptTold = PromptTold()

    @property
    def longest(self) -> int:
        """The most tokens of prompt and answer."""
        return len(self.prompt) + self.options.max_new_tokens


def piece_of(
    one: Choice, tokens: Sequence[int], log_probs: Sequence[float], likeliest: tuple[Any, Any], *, first: bool = False
) -> Piece:
    """New tokens of an answer, up to its end.

    Args:
        one: the answer.
        tokens: that came; -1 behind its end, so that one that ends it is the last of the others.
        log_probs: of each.
        likeliest: ids and log-probabilities of the likeliest tokens in the place of each, arrays [K, A].
        first: whether these are its first, with what is told of its prompt.
    """
    came = [token for token in tokens if token >= 0][: one.options.max_new_tokens]
    stop = came.pop() if came and came[-1] in one.options.stop_tokens else None
    count = len(came)
    reason = "length" if one.answered + count >= one.options.max_new_tokens else None
    told = (one.source or one).told if first else PromptTold()
    return Piece(
        one.request,
        one.number,
        tuple(came),
        tuple(log_probs[:count]),
        pairs(likeliest[0][:count], likeliest[1][:count], one.options.top_logprobs),
        reason if stop is None else "stop",
        stop,
        told.log_probs,
        told.likeliest,
    )


def pairs(ids: Any, values: Any, wanted: int | None) -> tuple[tuple[tuple[int, float], ...], ...]:
    """Tokens [S, A] with their log-probabilities, the likeliest in the place of each; empty where none are wanted."""
    if not wanted:
        return ()
    return tuple(
        tuple((int(token), float(value)) for token, value in zip(*both, strict=True) if token >= 0)
        for both in zip(ids[:, :wanted], values[:, :wanted], strict=True)
    )


def token_ids(prompt: Sequence[int], vocabulary: int) -> np.ndarray:
    """A prompt's token ids, int32.

    Args:
        prompt: integers, at least one.
        vocabulary: the number of the model's tokens.

    Raises:
        ConfigError: none, or what is no token of the model.
    """
    if not len(prompt):
        raise ConfigError("generate: expected prompts of at least one token each")
    for place, token in enumerate(prompt):
        if isinstance(token, bool | np.bool_) or not isinstance(token, int | np.integer) or not 0 <= token < vocabulary:
            raise ConfigError(
                f"generate: prompt token {place}: expected an integer from 0 to {vocabulary - 1}, got {shown(token)}"
            )
    return np.asarray(prompt, np.int32)
