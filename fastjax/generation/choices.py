"""Answers on the host: what is asked, what goes to the programs, and what comes of them."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from convert.errors import shown
from fastjax.errors import ConfigError
from fastjax.generation.adapters import NO_ADAPTER
from fastjax.generation.options import MAX_STOPS, GenerationOptions
from fastjax.generation.programs import Decoded
from fastjax.generation.sampling import host_arrays
from fastjax.generation.state import Prompts


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
    """

    request: int
    choice: int
    tokens: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    likeliest: tuple[tuple[tuple[int, float], ...], ...] = ()
    finish_reason: str | None = None
    stop_token: int | None = None

    def numbered(self, request: int) -> "Piece":
        """The piece of a request that has another number elsewhere."""
        return dataclasses.replace(self, request=request)


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

    @property
    def longest(self) -> int:
        """The most tokens of prompt and answer."""
        return len(self.prompt) + self.options.max_new_tokens


class Sizes(NamedTuple):
    """Sizes of the arrays of prompts.

    Attributes:
        rows: of the engine.
        entries: answers that come in at once, at most.
        tokens: of prompts that come in, at most.
        pages: of a row.
        page: tokens of a page.
        words: of the vocabulary.
    """

    rows: int
    entries: int
    tokens: int
    pages: int
    page: int
    words: int


def prompt_arrays(entries: Sequence[Choice], taken: Sequence[int], sizes: Sizes) -> Prompts:
    """The arrays of prompts that come in.

    Args:
        entries: their answers; one that shares another's prompt comes behind it.
        taken: tokens that come in of each one's prompt.
        sizes: of the arrays.
    """
    count, width = sizes.entries, sizes.tokens
    tokens, positions = np.zeros(width, np.int32), np.zeros(width, np.int32)
    answers, start = np.full(width, count, np.int32), 0
    rows, ends = np.full(count, sizes.rows, np.int32), np.full(count, -1, np.int32)
    sources, copies = np.arange(count, dtype=np.int32), np.zeros((count, 2), np.int32)
    fresh, lengths = np.ones(count, bool), np.zeros(count, np.int32)
    table = np.zeros((count, sizes.pages), np.int32)
    for entry, (one, more) in enumerate(zip(entries, taken, strict=True)):
        rows[entry], fresh[entry] = one.row, one.entered == 0
        table[entry, : len(one.pages)] = one.pages
        lengths[entry] = one.entered + more
        if one.source is None:
            here = slice(start, start + more)
            tokens[here] = one.prompt[one.entered : one.entered + more]
            positions[here] = np.arange(one.entered, one.entered + more)
            answers[here] = entry
            start += more
            ends[entry] = start - 1 if lengths[entry] == len(one.prompt) else -1
        else:
            sources[entry] = entries.index(one.source)
            ends[entry] = ends[sources[entry]]
            partial = len(one.prompt) // sizes.page
            if len(one.prompt) % sizes.page:
                copies[entry] = one.source.pages[partial], one.pages[partial]
    settings = [one.options for one in entries] + [GenerationOptions()] * (count - len(entries))
    choices = [one.number for one in entries] + [0] * (count - len(entries))
    limits = np.asarray([each.max_new_tokens for each in settings], np.int32)
    longest = np.ones(count, np.int32)
    longest[: len(entries)] = [one.longest for one in entries]
    stops = np.full((count, MAX_STOPS), -1, np.int32)
    for entry, each in enumerate(settings):
        stops[entry, : len(each.stop_tokens)] = each.stop_tokens
    adapters = np.full(count, NO_ADAPTER, np.int32)
    adapters[: len(entries)] = [one.adapter for one in entries]
    own: Any = (limits, longest, stops, host_arrays(settings, choices, sizes.words), adapters)
    arrays: Any = (tokens, positions, answers, rows, sources, copies, ends, fresh, table, lengths, *own)
    return Prompts(*arrays)


def piece_of(one: Choice, came: Decoded) -> Piece:
    """New tokens of an answer, up to its end.

    Args:
        one: the answer.
        came: its part of what came, [K] and [K, A].
    """
    tokens = [int(token) for token in came.tokens if token >= 0]
    stop = next((place for place, token in enumerate(tokens) if token in one.options.stop_tokens), None)
    count = len(tokens) if stop is None else stop
    reason = "length" if one.answered + count >= one.options.max_new_tokens else None
    wanted = one.options.top_logprobs or 0
    likeliest = tuple(
        tuple(
            (int(token), float(value)) for token, value in zip(ids[:wanted], values[:wanted], strict=True) if token >= 0
        )
        for ids, values in zip(came.likeliest_ids[:count], came.likeliest[:count], strict=True)
    )
    return Piece(
        one.request,
        one.number,
        tuple(tokens[:count]),
        tuple(float(value) for value in came.log_probs[:count]),
        likeliest if wanted else (),
        reason if stop is None else "stop",
        None if stop is None else tokens[stop],
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
