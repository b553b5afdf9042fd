"""Timings of an engine: rows that all decode, and requests until the last one has begun."""

import time
from types import SimpleNamespace

import numpy as np
import pytest

from fastjax.bench.generate import requests, steady
from fastjax.bench.generate.requests import Request, mixed_requests, serve
from fastjax.bench.generate.settings import GenerateSettings
from fastjax.bench.generate.steady import SteadyRows, prefill_seconds
from fastjax.errors import TrainingError


class FakeEngine:
    """So many rows, one of which begins in a call of a second; all that have begun get `steps` tokens in it."""

    def __init__(self, monkeypatch, rows, steps, short=0):
        self.rows, self.steps, self.short, self.now = rows, steps, short, 0.0
        self.waiting, self.going, self.number = [], {}, 0
        for module in (steady, requests):
            monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))

    @property
    def busy(self):
        return bool(self.waiting or self.going)

    def add(self, prompt, options):
        self.number += 1
        self.waiting.append((self.number, options.max_new_tokens - self.short))
        return self.number

    def cancel(self, request):
        self.going.pop(request, None)

    def step(self):
        self.now += 1.0
        if self.waiting and len(self.going) < self.rows:
            number, left = self.waiting.pop(0)
            self.going[number] = left
        pieces = []
        for number, left in list(self.going.items()):
            count = min(left, self.steps)
            self.going[number] -= count
            ended = self.going[number] == 0
            pieces.append(
                SimpleNamespace(request=number, tokens=(7,) * count, finish_reason="length" if ended else None)
            )
            if ended:
                del self.going[number]
        return pieces

    def run(self):
        while self.busy:
            yield from self.step()


def test_rows_are_timed_once_all_decode(monkeypatch):
    engine = FakeEngine(monkeypatch, rows=3, steps=4)
    answers = SteadyRows(engine, [[1] * 10] * 3, budget=100)
    assert list(answers.answered.values()) == [12, 8, 4] and engine.now == 3
    found = answers.decode(6)
    assert found[:3] == (2.0, 24, 8.0)
    # The first row's tokens 13 … 20 attend to 10 + 12 … 10 + 19, the last one's 5 … 12 to 10 + 4 … 10 + 11.
    seen = [10 + first + np.arange(8) for first in (12, 8, 4)]
    assert found.context == np.mean(seen)
    answers.release()
    assert not engine.busy


def test_a_row_that_ends_too_early_is_no_figure(monkeypatch):
    engine = FakeEngine(monkeypatch, rows=3, steps=4)
    with pytest.raises(TrainingError, match="an answer ended after 8 tokens, with 2 of 3 begun"):
        SteadyRows(engine, [[1] * 10] * 3, budget=8)


def test_the_prefill_ends_with_the_first_tokens(monkeypatch):
    assert prefill_seconds(FakeEngine(monkeypatch, rows=4, steps=4), [[1] * 5] * 4) == 4.0


def test_the_tail_of_requests_is_left_out(monkeypatch):
    given = [Request([1] * 3, 4), Request([1] * 5, 16), Request([1] * 2, 2)]
    served = serve(FakeEngine(monkeypatch, rows=2, steps=4), given)
    assert (served.seconds, served.tokens, served.prompt_tokens) == (5.0, 22, 10)
    assert (served.admitted_seconds, served.admitted_tokens) == (3.0, 4 + 8 + 2)
    with pytest.raises(TrainingError, match="3 of 3 answers .* number 1 has 3 tokens, expected 4"):
        serve(FakeEngine(monkeypatch, rows=2, steps=4, short=1), given)


def test_requests_have_every_length():
    drawn = mixed_requests(GenerateSettings(requests=400, prompts=(3, 6), answers=(2, 4)), vocabulary=11)
    assert len(drawn) == 400 and {len(one.prompt) for one in drawn} == {3, 4, 5, 6}
    assert {one.answer for one in drawn} == {2, 3, 4} and {word for one in drawn for word in one.prompt} == set(
        range(11)
    )


def test_the_time_is_the_wall_clock():
    assert steady.time is time and requests.time is time
