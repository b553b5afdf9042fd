"""Generation from the cache equals the whole forward pass; sampling stays among the tokens that it may take."""

import functools

import numpy as np
import pytest

from fastjax.errors import ConfigError
from fastjax.generation.generate import generate
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
        ({"top_k": -2}, "top_k"),
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
