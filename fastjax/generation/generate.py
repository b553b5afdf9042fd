"""Autoregressive generation: one prefill over the prompts, then one token a step from a KV cache, all in one jit.

Prompts of different lengths are padded on the left, so that all rows write the same slot of the cache; positions and
segment ids keep the padding out of attention.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int, PRNGKeyArray

from fastjax.errors import ConfigError
from fastjax.execution.language_model import LanguageModel, check_logits
from fastjax.generation.sampling import check_sampling, sample
from fastjax.models.caching import empty_states, step
from fastjax.models.context import Slots
from fastjax.models.decoder import lm_logits


def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    first_row: int = 0,
    stop_tokens: Sequence[int] = (),
) -> list[list[int]]:
    """Continue each prompt.

    Args:
        model: with or without an adapter.
        prompts: token ids, none empty; they are one batch.
        max_new_tokens: maximum number of new tokens.
        temperature: 0 takes the likeliest token; above, sampling.
        top_k: sample among the k likeliest tokens.
        top_p: sample among the likeliest tokens of this total probability.
        seed: of the sampling.
        first_row: number of the first prompt among all, of which these are a batch: each batch draws its own numbers.
        stop_tokens: the first of these ends a row, and is not returned.

    Returns:
        The new tokens of each prompt.

    Raises:
        ConfigError: an empty prompt, a setting out of range, or prompt and answer longer than max_seq_length.
    """
    check_logits(model, "generate")
    check_sampling(temperature, top_k, top_p, seed)
    if not prompts or not all(len(p) for p in prompts):
        raise ConfigError("generate: expected prompts of at least one token each")
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens: expected a positive integer, got {max_new_tokens!r}")
    longest = max(len(p) for p in prompts)
    if longest + max_new_tokens > model.max_seq_length:
        raise ConfigError(
            f"generate: a prompt of {longest} tokens and {max_new_tokens} new ones exceed max_seq_length "
            f"{model.max_seq_length}; load the model with a larger one"
        )
    tokens, lengths = _padded(prompts)
    new = _generate(
        model.graphdef,
        model.trainable,
        model.frozen,
        tokens,
        lengths,
        jax.random.fold_in(jax.random.key(seed), first_row),
        jnp.asarray(tuple(stop_tokens), jnp.int32),
        max_new_tokens=max_new_tokens,
        temperature=float(temperature),
        top_k=top_k,
        top_p=top_p,
    )
    ends = set(stop_tokens)
    return [list(itertools.takewhile(lambda token: token not in ends, row)) for row in np.asarray(new).tolist()]


def _padded(prompts: Sequence[Sequence[int]]) -> tuple[Int[np.ndarray, "B P"], Int[np.ndarray, "B"]]:
    """Prompts padded on the left to few distinct widths, so to few compilations; and their lengths."""
    lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
    width = -(-int(lengths.max()) // 32) * 32
    tokens = np.zeros((len(prompts), width), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[width - len(prompt) :] = prompt
    return tokens, lengths


@functools.partial(jax.jit, static_argnames=("graphdef", "max_new_tokens", "temperature", "top_k", "top_p"))
def _generate(
    graphdef: nnx.GraphDef,
    trainable: Any,
    frozen: Any,
    tokens: Int[Array, "B P"],
    lengths: Int[Array, "B"],
    key: PRNGKeyArray,
    stop_tokens: Int[Array, "N"],
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> Int[Array, "B M"]:
    model = nnx.merge(graphdef, trainable, frozen)
    batch, width = tokens.shape
    total = width + max_new_tokens
    slots = jnp.arange(total, dtype=jnp.int32)[None, :]
    filled = slots >= (width - lengths)[:, None]  # every slot of a row's prompt and answer

    def pick(hidden: Array, number: Array) -> Array:
        logits = lm_logits(model.lm_head, hidden[:, -1:, :])[:, 0, :]
        step_key = jax.random.fold_in(key, number)
        return sample(logits, step_key, temperature=temperature, top_k=top_k, top_p=top_p)

    positions = jnp.maximum(slots[:, :width] - (width - lengths)[:, None], 0)
    prompts = Slots(jnp.int32(0), (filled & (slots < width)).astype(jnp.int32), filled[:, :width].astype(jnp.int32))
    hidden, states = step(model, tokens, positions, prompts, empty_states(model, batch, total))
    first = pick(hidden, jnp.int32(0))
    out = jnp.zeros((batch, max_new_tokens), jnp.int32).at[:, 0].set(first)

    def ended(token: Array) -> Array:
        return jnp.any(token[:, None] == stop_tokens[None, :], axis=1)

    def going(carry: tuple[Array, Array, Array, Array, Any]) -> Array:
        number, _, done, _, _ = carry
        return (number < max_new_tokens) & ~jnp.all(done)

    def body(carry: tuple[Array, Array, Array, Array, Any]) -> tuple[Array, Array, Array, Array, Any]:
        number, token, done, out, states = carry
        slot = width + number - 1
        places = Slots(slot, (filled & (slots <= slot)).astype(jnp.int32), jnp.ones((batch, 1), jnp.int32))
        hidden, states = step(model, token[:, None], (lengths + number - 1)[:, None], places, states)
        token = pick(hidden, number)
        return number + 1, token, done | ended(token), out.at[:, number].set(token), states

    start = (jnp.int32(1), first, ended(first), out, states)
    return jax.lax.while_loop(going, body, start)[3]
