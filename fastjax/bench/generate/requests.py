"""Requests of different lengths through an engine: their time beside that of the same tokens alone."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fastjax.bench.generate.compilations import counted
from fastjax.bench.generate.settings import GenerateSettings
from fastjax.errors import TrainingError
from fastjax.generation.engine import Engine
from fastjax.generation.options import GenerationOptions


class Request(NamedTuple):
    """A prompt, and the number of tokens of its answer."""

    prompt: Sequence[int]
    answer: int


class Served(NamedTuple):
    """Requests that were served.

    Attributes:
        seconds: until all had ended.
        tokens: of all answers.
        prompt_tokens: of all prompts.
        admitted_seconds: until the last one had its first token: a tail follows in which rows are idle.
        admitted_tokens: of the answers until then.
        compilations: programs that were compiled meanwhile.
    """

    seconds: float
    tokens: int
    prompt_tokens: int
    admitted_seconds: float
    admitted_tokens: int
    compilations: int


def mixed_requests(settings: GenerateSettings, vocabulary: int) -> list[Request]:
    """Requests of uniform lengths and tokens.

    Args:
        settings: their number, and the bounds of their lengths.
        vocabulary: tokens that there are.
    """
    random, count = np.random.default_rng(0), settings.requests
    prompts, answers = (random.integers(least, most + 1, count) for least, most in (settings.prompts, settings.answers))
    sizes = zip(prompts, answers, strict=True)
    return [Request(random.integers(0, vocabulary, size).tolist(), int(answer)) for size, answer in sizes]


def serve(engine: Engine, requests: Sequence[Request]) -> Served:
    """Give an engine requests all at once, and wait for their answers.

    Args:
        engine: that has nothing else to do.
        requests: them.

    Raises:
        TrainingError: an answer that is not as long as it was to be.
    """
    with counted() as compiled:
        start = time.perf_counter()
        wanted = {engine.add(one.prompt, GenerationOptions(max_new_tokens=one.answer)): one.answer for one in requests}
        answered = dict.fromkeys(wanted, 0)
        admitted, admitted_tokens = 0.0, 0
        while engine.busy:
            for piece in engine.step():
                answered[piece.request] += len(piece.tokens)
            if not admitted and all(answered.values()):
                admitted, admitted_tokens = time.perf_counter() - start, sum(answered.values())
        seconds = time.perf_counter() - start
    if wrong := [request for request, tokens in wanted.items() if answered[request] != tokens]:
        first = wrong[0]
        raise TrainingError(
            f"{len(wrong)} of {len(wanted)} answers are not as long as they were to be: number {first} has "
            f"{answered[first]} tokens, expected {wanted[first]}"
        )
    prompt_tokens = sum(len(one.prompt) for one in requests)
    return Served(seconds, sum(answered.values()), prompt_tokens, admitted, admitted_tokens, compiled.count)
