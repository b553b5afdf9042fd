"""Rows of an engine that decode together while none of them begins or ends, and the prefill of prompts."""

import time
from collections.abc import Sequence
from typing import NamedTuple

from fastjax.bench.generate.compilations import counted
from fastjax.errors import TrainingError
from fastjax.generation.engine import Engine
from fastjax.generation.options import GenerationOptions


class Decoded(NamedTuple):
    """Steady decoding.

    Attributes:
        seconds: that it took.
        tokens: of all rows.
        steps: tokens of one row.
        context: tokens to which a new one attended, in the mean, itself included.
        compilations: programs that were compiled meanwhile.
    """

    seconds: float
    tokens: int
    steps: float
    context: float
    compilations: int


class SteadyRows:
    """Answers of which none begins or ends while they are timed.

    Attributes:
        answered: tokens of each answer so far, by request.
    """

    def __init__(self, engine: Engine, prompts: Sequence[Sequence[int]], budget: int):
        """Begin the answers: until each has later tokens than its first, so that its next ones are under way.

        Args:
            engine: with room for all of them at once.
            prompts: token ids, all of one length.
            budget: the most tokens of an answer, of which those before the last one begins are the first.

        Raises:
            TrainingError: an answer ended before the last one began.
        """
        self._engine, self._prompt = engine, len(prompts[0])
        options = GenerationOptions(max_new_tokens=budget)
        self.answered = {engine.add(prompt, options): 0 for prompt in prompts}
        while min(self.answered.values()) < 2:
            self._step()

    def decode(self, new: int) -> Decoded:
        """Time the answers' next tokens.

        Args:
            new: tokens that each gets, at least.

        Raises:
            TrainingError: an answer ended before.
        """
        before = dict(self.answered)
        with counted() as compiled:
            start = time.perf_counter()
            while any(self.answered[request] < count + new for request, count in before.items()):
                self._step()
            seconds = time.perf_counter() - start
        rows, first, last = len(before), sum(before.values()), sum(self.answered.values())
        context = self._prompt + (first + last - rows) / (2 * rows)
        return Decoded(seconds, last - first, (last - first) / rows, context, compiled.count)

    def release(self) -> None:
        """End the answers."""
        for request in self.answered:
            self._engine.cancel(request)
        for _ in self._engine.run():
            pass

    def _step(self) -> None:
        pieces = self._engine.step()
        for piece in pieces:
            self.answered[piece.request] += len(piece.tokens)
        if ended := [piece.request for piece in pieces if piece.finish_reason is not None]:
            begun, tokens = sum(map(bool, self.answered.values())), self.answered[ended[0]]
            raise TrainingError(f"an answer ended after {tokens} tokens, with {begun} of {len(self.answered)} begun")


def prefill_seconds(engine: Engine, prompts: Sequence[Sequence[int]]) -> float:
    """Seconds from the prompts to the first token of each, after which they end.

    Args:
        engine: with room for all of them.
        prompts: token ids.
    """
    for prompt in prompts:
        engine.add(prompt, GenerationOptions(max_new_tokens=1))
    start = time.perf_counter()
    for _ in engine.run():
        pass
    return time.perf_counter() - start
