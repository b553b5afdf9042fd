"""Prompts on their way in: which of them one call takes, their arrays, and what is told of their tokens."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fastjax.generation.adapters import NO_ADAPTER
from fastjax.generation.choices import Choice, PromptTold, pairs
from fastjax.generation.options import MAX_STOPS, GenerationOptions
from fastjax.generation.sampling import Told, host_arrays
from fastjax.generation.state import Prompts


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
    following, scored = np.full(width, -1, np.int32), np.asarray(any(map(tells, entries)))
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
            behind = one.prompt[one.entered + 1 : one.entered + more + 1]
            following[start : start + len(behind)] = behind
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
    arrays: Any = (
        tokens,
        positions,
        answers,
        rows,
        sources,
        copies,
        ends,
        fresh,
        following,
        scored,
        table,
        lengths,
        *own,
    )
    return Prompts(*arrays)


class Call(NamedTuple):
    """Prompts, or a piece of one, that one call takes in.

    Attributes:
        entries: their answers; one that shares another's prompt comes behind it.
        taken: tokens of each, of those that share a prompt all of it.
        packed: whether all of them begin here.
        before: tokens of each that were in before.
    """

    entries: list[Choice]
    taken: list[int]
    packed: bool
    before: list[int]

    @property
    def tokens(self) -> int:
        """How many come in."""
        return sum(count for one, count in zip(self.entries, self.taken, strict=True) if one.source is None)

    @property
    def ended(self) -> list[tuple[int, Choice]]:
        """The answers whose prompts are in, with their entries."""
        every = zip(self.entries, self.before, self.taken, strict=True)
        return [(entry, one) for entry, (one, before, more) in enumerate(every) if before + more == len(one.prompt)]


def next_call(entering: Sequence[Choice], chunk: int, entries: int, *, packs: bool) -> Call:
    """The prompts that come in next.

    Args:
        entering: answers whose prompts are not in, at least one.
        chunk: tokens of a call at most.
        entries: answers of a call at most.
        packs: whether prompts may come in together.
    """
    first = entering[0]
    left = len(first.prompt) - first.entered
    if first.entered or left > chunk or not packs:
        together = [first]
        if left <= chunk:  # the last piece: those that share it begin
            together += [one for one in entering if one.source is first]
        taken = [min(left, chunk), *[len(first.prompt)] * (len(together) - 1)]
        return Call(together, taken, False, [one.entered for one in together])
    together, room = [], chunk
    for one in entering:
        if one.source is not None:
            continue
        group = [one, *(other for other in entering if other.source is one)]
        if len(together) + len(group) > entries or len(one.prompt) > room:
            break
        together += group
        room -= len(one.prompt)
    return Call(together, [len(one.prompt) for one in together], True, [0] * len(together))


def tells(choice: Choice) -> bool:
    """Whether the log-probabilities of an answer's prompt are asked for."""
    return choice.options.prompt_logprobs is not None


def add_told(call: Call, told: Told) -> None:
    """Keep what is told of the tokens that came in, of prompts that ask for it.

    Args:
        call: what came in.
        told: of the token behind each, on the host.
    """
    start = 0
    for one, before, count in zip(call.entries, call.before, call.taken, strict=True):
        if one.source is not None:
            continue
        if tells(one):
            here = slice(start, start + min(count, len(one.prompt) - before - 1))
            log_probs = tuple(float(value) for value in told.log_probs[here])
            likeliest = pairs(told.likeliest_ids[here], told.likeliest[here], one.options.prompt_logprobs)
            first = PromptTold((None,), ((),) if one.options.prompt_logprobs else ())
            so_far = one.told if before else first
            one.told = PromptTold(so_far.log_probs + log_probs, so_far.likeliest + likeliest)
        start += count
