"""Layers with a sliding window keep a ring of it a row, and answer as the forward pass does."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastjax.generation import engine as engine_module
from fastjax.generation.engine import Engine
from fastjax.generation.options import GenerationOptions
from fastjax.generation.state import by_axis, has_axis
from fastjax.models.mixers.keys_values import last_of_rows
from tests.fastjax.generation.test_engine import collected, tokens_of, whole_passes
from tests.support import tiny
from tests.support.families import CONFIGS
from tests.support.family_mixtures import MIXTURES
from tests.support.family_sizes import FULL, LINEAR, SLIDING

PAGE = 4
#: A config, its layers, and the pages of its windows of 10 and of 8 tokens.
MODELS = {
    "gemma3_text": ({**CONFIGS["gemma3_text"], "sliding_window": 10}, [SLIDING, FULL, SLIDING], 3),
    "gpt_oss": ({**MIXTURES["gpt_oss"], "sliding_window": 8}, [SLIDING, FULL], 2),
}
#: The same, and a model whose rows have states of one size.
STATES = {**MODELS, "qwen3_5_text": (CONFIGS["qwen3_5_text"], [LINEAR, FULL], 0)}


@pytest.fixture(autouse=True)
def small_pages(monkeypatch):
    """Prompts of several pieces, and pieces and packed prompts that are longer than a ring."""
    for name, size in (("PAGE", PAGE), ("CHUNK", 32), ("LEAST", 32)):
        monkeypatch.setattr(engine_module, name, size)


def model(folder, family):
    config, layers, _ = STATES[family]
    return tiny.model(folder, {**config, "layer_types": layers, "num_hidden_layers": len(layers)}, max_seq_length=64)


@pytest.mark.exhaustive("gpt_oss", "qwen3_5_text")
@pytest.mark.parametrize("family", STATES)
def test_answers_beyond_the_window(family, tmp_path):
    """Prompts shorter than the window, longer than the ring, and of two pieces; shared ones, in rows used before."""
    made = model(tmp_path, family)
    engine = Engine(made, rows=4, steps=4, prefill_tokens=32)
    prompts = [prompt.tolist() for prompt in tiny.documents(STATES[family][0], (3, 29, 43, 7))]
    drawn = GenerationOptions(max_new_tokens=17, temperature=1.0, seed=5)
    requests = [(prompt, dataclasses.replace(drawn, n=n)) for prompt, n in zip(prompts, (1, 2, 3, 1), strict=True)]
    found = collected(engine, requests, [0, 0, 1, 2])
    answers = [tokens_of(pieces) for pieces in found[2]]
    assert len({*map(tuple, answers)}) == 3, "each answer needs a ring of its own"
    for (prompt, _), choices in zip(requests, found, strict=True):
        for pieces in choices:
            answer = tokens_of(pieces)
            whole = whole_passes(made, prompt, answer, width=64)
            told = [value for piece in pieces for value in piece.log_probs]
            # float32, another order of sums
            np.testing.assert_allclose(told, whole[np.arange(17), answer], rtol=0, atol=2e-4)


@pytest.mark.parametrize("family", MODELS)
def test_a_window_takes_its_ring_alone(family, tmp_path):
    made, (_, layers, ring) = model(tmp_path, family), MODELS[family]
    config, sizes = made.value.config, {}
    token = config.num_key_value_heads * config.head_dim * 4
    states = Engine(made, rows=3)._state.layers
    for axis in ("rows", "pages"):
        sizes[axis] = []
        by_axis(states, axis, lambda leaf, _, axis=axis: sizes[axis].append(leaf.nbytes))
    assert sum(sizes["rows"]) == 2 * layers.count(SLIDING) * 3 * ring * PAGE * token
    assert sum(sizes["pages"]) == 2 * layers.count(FULL) * (3 * 16 + 1) * PAGE * token
    assert len(jax.tree.leaves(states)) == len(sizes["rows"]) + len(sizes["pages"])
    short = Engine(made, rows=3, max_length=ring * PAGE)
    assert not has_axis(short._state.layers, "rows"), "the pages take no more"


def test_no_two_tokens_are_written_to_one_place():
    """Their order would be undefined: of a row's 7, 3 and 2 tokens those that come last, and padding is dropped."""
    rows = jnp.asarray([[2] * 7 + [0] * 3 + [1] * 2 + [9] * 5], jnp.int32)
    assert last_of_rows(rows, 3, 9).tolist() == [[9] * 4 + [2] * 3 + [0] * 3 + [1] * 2 + [9] * 5]
    assert last_of_rows(rows, 17, 9) is rows
