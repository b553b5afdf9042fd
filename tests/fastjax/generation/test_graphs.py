"""On a GPU the loops and conditions of generation are in CUDA graphs: the answers are alike, and the host is free."""

import functools
import time

import jax
import numpy as np
import pytest

from fastjax.generation import engine as engine_module
from fastjax.generation.engine import Engine
from fastjax.generation.options import GenerationOptions
from fastjax.generation.programs import decode, prefill
from tests.support import tiny

pytestmark = pytest.mark.gpu

CHANGES = {"tie_word_embeddings": False, "initializer_range": 0.3, "max_position_embeddings": 2048}
#: Each way through the picking of tokens: greedy, by chance, filters, penalties, biases, and what is told.
SETTINGS = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 20},
    {"temperature": 1.2, "top_p": 0.7},
    {"temperature": 0.9, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "temperature": 0.7},
    {"logit_bias": {5: 4.0, 7: -100}},
    {"top_logprobs": 5},
    {"prompt_logprobs": 3, "temperature": 0.5},
    {"temperature": 1.0, "n": 3},
)


@functools.cache
def model():
    return tiny.model(tiny.shared_folder(**CHANGES), tiny.config(**CHANGES), dtype="float32")


def answers(engine):
    """Tokens of each answer to requests with every setting, alone and together."""
    random, found = np.random.default_rng(0), {}
    for first in (*range(len(SETTINGS)), None):
        for number, each in enumerate(SETTINGS if first is None else SETTINGS[first : first + 1]):
            tokens = random.integers(0, model().config.vocab_size, random.integers(3, 60)).tolist()
            engine.add(tokens, GenerationOptions(max_new_tokens=int(random.integers(9, 30)), seed=number, **each))
        for piece in engine.run():
            found.setdefault((piece.request, piece.choice), []).extend(piece.tokens)
            assert np.isfinite(piece.log_probs).all()
    return found


def test_answers_are_those_without_graphs(monkeypatch):
    graphs = answers(Engine(model(), rows=8, max_length=96))
    for name, program, static in (("decode", decode, "steps"), ("prefill", prefill, "packed")):
        plain = jax.jit(program.__wrapped__, static_argnames=static, donate_argnames="state")
        monkeypatch.setattr(engine_module, name, plain)
    assert graphs == answers(Engine(model(), rows=8, max_length=96)) and sum(map(len, graphs.values())) > 200


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_call_comes_back_before_the_device_has_ended_it(temperature):
    """Without graphs the host waits at each turn of the loop, and at each condition."""
    engine = Engine(model(), rows=8, max_length=1600, steps=1500)
    for _ in range(2):  # the first time it compiles
        for number in range(8):
            engine.add([number] * 9, GenerationOptions(max_new_tokens=1500, temperature=temperature, seed=number))
        start = time.perf_counter()
        engine.begin()
        begun = time.perf_counter() - start
        assert sum(len(piece.tokens) for piece in engine.run()) == 8 * 1500
        whole = time.perf_counter() - start
    assert begun < whole / 2
