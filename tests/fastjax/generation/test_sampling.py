"""Sampling on the device against exact distributions in float64, and a row's independence of its neighbours."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fastjax.generation.options import GenerationOptions
from fastjax.generation.sampling import host_arrays, pick

WORDS = 300  # more than two blocks of the search for the likeliest, the last of them filled up
#: Settings that ask for nothing beside the temperature, each in its own way.
OFF = {
    "top_k": (None, 0, -1, WORDS, 2**32 - 1),
    "top_p": (None, 1.0),
    "min_p": (None, 0.0),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "logit_bias": ({}, {7: 0.0}),
}
picked = jax.jit(pick)


def run(logits, options, *, seen=None, numbers=None, choices=None):
    """What is picked of the rows, as NumPy arrays."""
    rows, words = logits.shape
    found = picked(
        jnp.asarray(logits),
        host_arrays([one.checked(words) for one in options], [0] * rows if choices is None else choices, words),
        jnp.zeros((rows, words), jnp.int32) if seen is None else jnp.asarray(seen, jnp.int32),
        jnp.arange(rows, dtype=jnp.int32) if numbers is None else jnp.asarray(numbers, jnp.int32),
    )
    return jax.tree.map(np.asarray, found)


def log_softmax(logits):
    wide = np.asarray(logits, np.float64)
    return (
        wide
        - np.log(np.sum(np.exp(wide - wide.max(-1, keepdims=True)), -1, keepdims=True))
        - wide.max(-1, keepdims=True)
    )


def distribution(logits, option, prompt=(), answer=()):
    """The probabilities of a row's tokens, in float64: transformers' processors in their order."""
    wide = np.asarray(logits, np.float64).copy()
    bias = dict(option.logit_bias)
    if 100 in bias.values():
        wide[[token not in bias or bias[token] != 100 for token in range(len(wide))]] = -np.inf
    for token, value in bias.items():
        wide[token] += {100: 0, -100: -np.inf}.get(value, value)
    for token in {*prompt, *answer}:
        wide[token] *= 1 / option.repetition_penalty if wide[token] > 0 else option.repetition_penalty
    for token in set(answer):
        wide[token] -= option.presence_penalty + option.frequency_penalty * list(answer).count(token)
    if option.temperature == 0:
        return (np.arange(len(wide)) == wide.argmax()).astype(np.float64)
    wide = (wide - wide.max()) / option.temperature
    if 0 < (option.top_k or 0) < len(wide):
        wide[wide < np.sort(wide)[-option.top_k]] = -np.inf
    probability = np.exp(wide) / np.exp(wide).sum()
    if option.top_p is not None and option.top_p < 1:
        above = np.asarray([probability[probability > one].sum() for one in probability])
        probability[above >= max(option.top_p, 1e-30)] = 0
    probability[probability < (option.min_p or 0) * probability.max()] = 0
    return probability / probability.sum()


def rows_of(logits, prompt=(), answer=(), rows=1):
    seen = np.zeros((rows, len(logits)), np.int32)
    seen[:, list(prompt)] |= 1
    for token in answer:
        seen[:, token] += 2
    return np.tile(logits, (rows, 1)), seen


@functools.cache
def random_logits(rows=24, words=WORDS, seed=0):
    return (np.random.default_rng(seed).normal(size=(rows, words)) * 3).astype(np.float32)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0},
        {"temperature": 0.5, "top_k": 4},
        {"temperature": 2.0, "top_p": 0.8},
        {"temperature": 1.5, "min_p": 0.2},
        {"temperature": 1.3, "top_k": 6, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.7},
        {"temperature": 1.0, "presence_penalty": 1.0, "frequency_penalty": -0.5, "logit_bias": {3: 2.5, 1: -100}},
        {"temperature": 1.0, "logit_bias": {2: 100, 5: 100}},
    ],
    ids=str,
)
def test_frequencies_are_those_of_the_distribution(settings):
    """χ² of 8,192 draws over twelve words, one of which is masked."""
    logits = (np.random.default_rng(1).normal(size=12) * 1.5).astype(np.float32)
    logits[4] = -np.inf
    prompt, answer, rows = (0, 3), (3, 7, 7), 8192
    options = GenerationOptions(**settings, seed=5)
    many, seen = rows_of(logits, prompt, answer, rows)
    found = run(many, [options] * rows, seen=seen)
    expected = distribution(logits, options, prompt, answer)
    counts = np.bincount(found.tokens, minlength=12)
    assert not counts[expected == 0].any()
    likely = expected > 0
    squares = np.sum((counts[likely] - rows * expected[likely]) ** 2 / (rows * expected[likely]))
    assert squares < likely.sum() + 6 * np.sqrt(2 * likely.sum())  # of a mean of their number less one
    assert np.abs(found.log_probs - log_softmax(logits)[found.tokens]).max() < 1e-5
