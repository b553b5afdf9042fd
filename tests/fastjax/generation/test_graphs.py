"""On a GPU the loops and conditions of generation are in CUDA graphs: answers are alike, the host is free meanwhile."""

import functools
import re

import jax
import numpy as np
import pytest

from fastjax.generation import engine as engine_module
from fastjax.generation import programs
from fastjax.generation.bound import BoundDecoder
from fastjax.generation.engine import Engine
from fastjax.generation.options import GenerationOptions
from fastjax.generation.programs import decode, prefill
from tests.support import tiny
from tests.support.aot import AOT, QUICK_CODE, needs_cuda_plugin

CHANGES = {"tie_word_embeddings": False, "initializer_range": 0.3}
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
def model(**options):
    return tiny.model(tiny.shared_folder(**CHANGES), tiny.config(**CHANGES), **options)


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


@pytest.mark.gpu
def test_answers_are_those_without_graphs(monkeypatch):
    graphs = answers(Engine(model(), rows=8, max_length=96))
    for name, program, static in (("decode", decode, "steps"), ("prefill", prefill, "packed")):
        plain = jax.jit(program.__wrapped__, static_argnames=static, donate_argnames="state")
        monkeypatch.setattr(engine_module, name, plain)
    assert graphs == answers(Engine(model(), rows=8, max_length=96)) and sum(map(len, graphs.values())) > 200


@pytest.mark.aot
@needs_cuda_plugin
@pytest.mark.exhaustive("scan-decode")
@pytest.mark.parametrize("name", ["decode", "prefill"])
@pytest.mark.parametrize("loop", ["scan", "unroll"])
def test_the_host_is_asked_for_nothing(loop, name, tmp_path):
    """Outside of graphs there are only loops of a known number of turns: over tokens, and over scanned layers."""
    aot, engine = AOT(), Engine(model(load_in_4bit=True, dtype="bfloat16", layer_loop=loop), rows=8, max_length=96)
    given = np.zeros(8, np.int32) if name == "decode" else engine._arrays([], [], 64)
    arguments = jax.eval_shape(lambda: (BoundDecoder.of(engine.model), engine._state, given))
    options = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True, **QUICK_CODE}
    with aot.tracing():
        specs = jax.tree.map(lambda leaf: aot.spec(leaf.shape, leaf.dtype), arguments)
        program, static = {"decode": (decode, {"steps": 5}), "prefill": (prefill, {"packed": True})}[name]
        text = program.trace(*specs, **static).lower().compile(compiler_options=options).as_text()
    [dump] = tmp_path.glob("*thunk_sequence_after_thunk_passes.txt")
    turns = [] if loop == "unroll" else [3, 5] if name == "decode" else [3]
    assert outside_graphs(dump.read_text()).count("kWhile") == len(turns)
    assert {*turns} <= {int(count) for count in re.findall(r'"known_trip_count":{"n":"(\d+)"', text)}
    assert "kConditional" not in outside_graphs(dump.read_text()) and "kConditional" in dump.read_text()


def test_flags_of_xla_are_left_alone(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/nowhere")
    assert programs._graphs() == programs._GRAPHS
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/nowhere --xla_gpu_enable_command_buffer=")
    assert programs._graphs() == {}


def outside_graphs(thunks):
    """The kinds of what the host starts by itself."""
    kinds, graph = [], None
    for indent, kind in re.findall(r"^( *)\d+: (k\w+)", thunks, re.MULTILINE):
        if graph is None or len(indent) <= graph:
            graph = len(indent) if kind == "kCommandBuffer" else None
            kinds.append(kind)
    return kinds
