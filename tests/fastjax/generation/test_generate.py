"""Generation from the cache equals the whole forward pass; sampling stays among the tokens that it may take."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastjax.errors import ConfigError
from fastjax.generation import generate
from fastjax.generation.sampling import sample
from tests.support import tiny

#: Untied and with large weights: small random models repeat a token for ever.
CHANGES = {"tie_word_embeddings": False, "initializer_range": 0.3, "hidden_size": 64}
CONFIG = tiny.config(**CHANGES)


@functools.cache
def model(adapter=False):
    base = tiny.model(tiny.shared_folder(**CHANGES), CONFIG, load_in_4bit=True)
    targets = ["q_proj", "v_proj", "down_proj", "embed_tokens", "lm_head"]
    return tiny.adapted(base, use_dora=True, lora_dropout=0.5, target_modules=targets) if adapter else base


@functools.cache
def prompts():
    return [prompt.tolist() for prompt in tiny.documents(CONFIG, (9, 1, 33, 20), seed=4)]


def test_greedy_tokens_are_those_of_the_whole_forward_pass():
    """With an adapter over 4-bit weights, left-padded rows, and no dropout."""
    answers = generate(model(adapter=True), prompts(), max_new_tokens=12)
    for prompt, answer in zip(prompts(), answers, strict=True):
        assert len(answer) == 12 and len(set(answer)) > 4
        padded = np.zeros((1, 48), np.int32)
        padded[0, : len(prompt) + 12] = prompt + answer
        whole = tiny.logits(model(adapter=True), padded)[0].argmax(-1)
        assert answer == whole[len(prompt) - 1 : len(prompt) + 11].tolist()
    assert answers != generate(model(), prompts(), max_new_tokens=12), "the adapter does nothing"


def test_a_row_ends_before_its_stop_token():
    free = generate(model(), prompts(), max_new_tokens=12)
    stops = [free[0][3], free[1][7]]
    expected = [row[: next((n for n, token in enumerate(row) if token in stops), 12)] for row in free]
    assert generate(model(), prompts(), max_new_tokens=12, stop_tokens=stops) == expected
    assert len(expected[0]) <= 3 and len(expected[1]) <= 7


def test_the_seed_decides_what_is_sampled():
    options = {"max_new_tokens": 12, "temperature": 1.0, "top_k": 50, "top_p": 0.95}
    first, again, other = (generate(model(), prompts(), seed=seed, **options) for seed in (1, 1, 2))
    assert first == again != other
    last = [generate(model(), prompts(), seed=2**32 - 1, first_row=row, **options) for row in (0, 4)]
    assert last[0] != last[1]
    assert generate(model(), prompts(), max_new_tokens=12, temperature=1.0, top_k=1, seed=3) == generate(
        model(), prompts(), max_new_tokens=12
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": [[1], []]}, "at least one token"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 127}, "max_seq_length 128"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_k": 2**70}, "top_k"),
        ({"seed": 2**70}, "seed"),
        ({"top_p": 1.5}, "top_p"),
    ],
)
def test_what_is_refused(options, message):
    options = {"prompts": [[1, 2]], "max_new_tokens": 4, **options}
    with pytest.raises(ConfigError, match=message):
        generate(model(), **options)


def drawn(logits, count=4000, **options):
    keys = jax.random.split(jax.random.key(0), count)
    logits = jnp.asarray(logits, jnp.float32)[None]
    settings = {"temperature": 1.0, "top_k": None, "top_p": None, **options}
    tokens = np.asarray(jax.vmap(lambda key: sample(logits, key, **settings)[0])(keys))
    return np.bincount(tokens, minlength=logits.shape[1]) / count


PROBABILITY = np.array([0.05, 0.4, 0.15, 0.3, 0.1])


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 9}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.69}, [1, 3]),
        ({"top_p": 0.71}, [1, 2, 3]),
        ({"top_p": 0.01}, [1]),
        ({"top_k": 3, "top_p": 0.8}, [1, 3]),  # of the three likeliest alone: 0.47, 0.82, 1
        ({"temperature": 0.0}, [1]),
        ({"temperature": 1e-38}, [1]),  # the quotients overflow
        ({"temperature": 1e-46}, [1]),  # 0 in float32
        ({"top_p": 1e-46}, [1]),
    ],
)
def test_tokens_are_drawn_by_their_probability_among_those_that_are_kept(options, kept):
    expected = np.zeros(5)
    expected[kept] = PROBABILITY[kept] / PROBABILITY[kept].sum()
    found = drawn(np.log(PROBABILITY), **options)
    assert set(np.flatnonzero(found)) == set(kept)
    assert np.abs(found - expected).max() < 0.03  # four standard errors of 4,000 draws


def test_temperature_divides_the_logits():
    expected = PROBABILITY**2 / (PROBABILITY**2).sum()
    assert np.abs(drawn(np.log(PROBABILITY), temperature=0.5) - expected).max() < 0.03
