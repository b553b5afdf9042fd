"""Choice of the next token of many rows, each by its own settings, on the device.

All settings are arrays, so nothing that a user varies compiles again; `lax.cond` leaves out what no row asks for. A
token is drawn as the first of a race: each waits an exponentially distributed time over its probability. That time
depends on the row's own seed, choice and token number alone: neighbours, their number and their filters change no row's
tokens.

The order is that of transformers: bias, penalties, temperature, top-k, top-p, min-p. Log-probabilities are those of
the model's own logits, before all of these.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

from fastjax.generation.filters import kept
from fastjax.generation.options import MAX_BIAS, MAX_BIASES, MAX_LIKELIEST, GenerationOptions

_TINY = jnp.finfo(jnp.float32).tiny  # the least normal number: smaller ones are 0 on a GPU
_BLOCK = 128
"""Words of which the largest is found first, in the search for the likeliest."""


class Sampling(NamedTuple):
    """Settings of the rows of a batch (W rows); a row of zeros asks for nothing.

    Attributes:
        temperature: float32, divides the logits; 0: the likeliest token.
        top_k: int32, draw among the k likeliest tokens, and those level with the last of them; 0: among all.
        top_p: float32, draw among the likeliest tokens of this total probability (Holtzman et al., arXiv 1904.09751);
            1: among all.
        min_p: float32, draw among tokens of at least this share of the likeliest one's probability (Nguyen et al.,
            arXiv 2407.01082); 0: among all.
        repetition: float32, divides positive logits of the tokens of prompt and answer, and multiplies negative ones
            (Keskar et al., arXiv 1909.05858); 1 or 0: off.
        presence: float32, taken from the logits of the answer's tokens.
        frequency: float32, taken from the logits of the answer's tokens, once for each time they stand there.
        seeds: uint32, of the random numbers.
        choices: uint32, number of the answer among those of one prompt, which draw different numbers.
        bias_ids: int32, tokens with a bias; -1: none.
        bias: float32, added to their logits, the first one 0 if there is none; -inf bans a token, inf bans all tokens
            that do not have it.
        wanted: int32, how many of the likeliest tokens are told; 0: none.
    """

    temperature: Float[Array, "W"]
    top_k: Int[Array, "W"]
    top_p: Float[Array, "W"]
    min_p: Float[Array, "W"]
    repetition: Float[Array, "W"]
    presence: Float[Array, "W"]
    frequency: Float[Array, "W"]
    seeds: UInt[Array, "W"]
    choices: UInt[Array, "W"]
    bias_ids: Int[Array, "W 300"]
    bias: Float[Array, "W 300"]
    wanted: Int[Array, "W"]


class Picked(NamedTuple):
    """The rows' next tokens.

    Attributes:
        tokens: int32.
        log_probs: float32, of the tokens, by log-softmax of the model's own logits; -inf for a forced token that the
            model masks.
        likeliest_ids: int32, the 20 likeliest tokens, best first, of equal ones the lower id first; -1: the vocabulary
            has no more that can be drawn. Zeros if no row wants any.
        likeliest: float32, their log-probabilities; -inf beside -1.
    """

    tokens: Int[Array, "W"]
    log_probs: Float[Array, "W"]
    likeliest_ids: Int[Array, "W 20"]
    likeliest: Float[Array, "W 20"]


class Told(NamedTuple):
    """Log-probabilities of S tokens that are there already, as `Picked` has them of those that it picks.

    Attributes:
        log_probs: float32, of the tokens.
        likeliest_ids: int32, the 20 likeliest tokens in the place of each.
        likeliest: float32, their log-probabilities.
    """

    log_probs: Float[Array, "S"]
    likeliest_ids: Int[Array, "S 20"]
    likeliest: Float[Array, "S 20"]


def host_arrays(options: Sequence[GenerationOptions], choices: Sequence[int], vocabulary: int) -> Sampling:
    """The rows' settings as NumPy arrays.

    Args:
        options: of each row, checked.
        choices: number of each row's answer among those of its prompt.
        vocabulary: number of the model's tokens.
    """
    rows = len(options)
    bias_ids, bias = np.full((rows, MAX_BIASES), -1, np.int32), np.zeros((rows, MAX_BIASES), np.float32)
    for row, one in enumerate(options):
        asked = ((token, value) for token, value in one.logit_bias.items() if abs(value) >= _TINY)
        for place, (token, value) in enumerate(asked):
            bias_ids[row, place] = token
            bias[row, place] = value if abs(value) < MAX_BIAS else np.copysign(np.inf, value)

    def column(dtype: Any, values: Sequence[Any]) -> Any:
        return np.asarray(values, dtype).reshape(rows)

    return Sampling(
        temperature=column(np.float32, [one.temperature for one in options]),
        top_k=column(np.int32, [k if (k := one.top_k or 0) in range(1, vocabulary) else 0 for one in options]),
        top_p=column(np.float32, [1 if one.top_p is None else one.top_p for one in options]),
        min_p=column(np.float32, [one.min_p or 0 for one in options]),
        repetition=column(np.float32, [one.repetition_penalty for one in options]),
        presence=column(np.float32, [one.presence_penalty for one in options]),
        frequency=column(np.float32, [one.frequency_penalty for one in options]),
        seeds=column(np.uint32, [one.seed for one in options]),
        choices=column(np.uint32, choices),
        bias_ids=bias_ids,  # pyright: ignore[reportArgumentType]
        bias=bias,  # pyright: ignore[reportArgumentType]
        wanted=column(np.int32, [one.top_logprobs or 0 for one in options]),
    )


def pick(logits: Float[Array, "W V"], sampling: Sampling, seen: Int[Array, "W V"], numbers: Int[Array, "W"]) -> Picked:
    """The next token of each row, and its log-probability.

    Args:
        logits: of the model, of any float dtype; -inf for words that are none.
        sampling: the rows' settings.
        seen: int32; the lowest bit: the token stands in the row's prompt; the others: how often it stands in the
            answer so far.
        numbers: int32, of the token in its answer, from 0.
    """
    sampling = sampling._replace(repetition=jnp.where(sampling.repetition == 0, 1.0, sampling.repetition))
    biased, penalized, drawn, told = _asked(sampling)
    likeliest = _argmax(logits)
    top, log_sum = _normalizer(logits, likeliest)

    def unchanged() -> Array:
        return _choose(logits, likeliest, sampling, numbers)

    def changed() -> Array:
        wide = logits.astype(jnp.float32)
        wide = jax.lax.cond(biased, lambda: _with_bias(wide, sampling), lambda: wide)
        wide = jax.lax.cond(penalized, lambda: _with_penalties(wide, sampling, seen), lambda: wide)
        return _choose(wide, _argmax(wide), sampling, numbers)

    def by_settings() -> tuple[Array, Array, Array]:
        # Logits that nothing changes are read as they are: a branch that gave them back would copy them.
        tokens = jax.lax.cond(biased | penalized, changed, unchanged)
        return tokens, *jax.lax.cond(told, best, nothing)

    def best() -> tuple[Array, Array]:
        ids, values = _likeliest(logits)
        return ids, values - top - log_sum

    def nothing() -> tuple[Array, Array]:
        shape = (len(logits), MAX_LIKELIEST)
        return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)

    # One question where the answer is mostly no: a GPU waits for the host at each.
    anything = biased | penalized | drawn | told
    tokens, ids, log_probs = jax.lax.cond(anything, by_settings, lambda: (likeliest, *nothing()))
    return Picked(tokens, (_at(logits, tokens) - top - log_sum)[:, 0], ids, log_probs)


def tell(logits: Float[Array, "S V"], tokens: Int[Array, "S"]) -> Told:
    """The log-probabilities of tokens, and the likeliest in the place of each.

    Args:
        logits: as of `pick`.
        tokens: of the vocabulary.
    """
    top, log_sum = _normalizer(logits, _argmax(logits))
    ids, values = _likeliest(logits)
    return Told((_at(logits, tokens) - top - log_sum)[:, 0], ids, values - top - log_sum)


def _normalizer(logits: Float[Array, "W V"], likeliest: Int[Array, "W"]) -> tuple[Float[Array, "W 1"], ...]:
    """The largest logit, and the logarithm of the sum of the exponentials above it, float32."""
    top = _at(logits, likeliest)
    return top, jnp.log(jnp.sum(jnp.exp(logits.astype(jnp.float32) - top), axis=-1, keepdims=True))


def _asked(sampling: Sampling) -> tuple[Bool[Array, ""], ...]:
    """Whether any row asks for a bias, for a penalty, for a token by chance, and for the likeliest tokens."""
    penalties = (sampling.repetition != 1) | (sampling.presence != 0) | (sampling.frequency != 0)
    rows = (sampling.bias[:, 0] != 0, penalties, sampling.temperature >= _TINY, sampling.wanted > 0)
    bits = [row.astype(jnp.int32) << place for place, row in enumerate(rows)]
    all_bits = jax.lax.reduce_or(functools.reduce(jnp.bitwise_or, bits), axes=(0,))  # one kernel for all four
    return tuple(all_bits & (1 << place) != 0 for place in range(len(rows)))


def _with_bias(logits: Float[Array, "W V"], sampling: Sampling) -> Float[Array, "W V"]:
    """The logits with the rows' biases."""
    rows, words = logits.shape
    bias, places = sampling.bias, jnp.maximum(sampling.bias_ids, 0)
    own = jnp.take_along_axis(logits, places, axis=-1)
    forced = bias == jnp.inf
    only = jnp.any(forced, axis=-1, keepdims=True)
    # A forced token can be drawn though the model masks it; penalties leave the number finite.
    own = jnp.where(forced, jnp.maximum(own, -1e30), jnp.where(only, -jnp.inf, own + bias))
    ids = jnp.where(sampling.bias_ids < 0, words, places)  # beyond the vocabulary: dropped
    return jnp.where(only, -jnp.inf, logits).at[jnp.arange(rows)[:, None], ids].set(own, mode="drop")


def _with_penalties(logits: Float[Array, "W V"], sampling: Sampling, seen: Int[Array, "W V"]) -> Float[Array, "W V"]:
    """The logits with the rows' penalties; `seen` as of `pick`."""
    repetition = sampling.repetition[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    times = (seen >> 1).astype(jnp.float32)
    penalty = sampling.frequency[:, None] * times + sampling.presence[:, None] * jnp.minimum(times, 1.0)
    return jnp.where(seen != 0, repeated, logits) - penalty


def _choose(
    logits: Float[Array, "W V"], likeliest: Int[Array, "W"], sampling: Sampling, numbers: Int[Array, "W"]
) -> Int[Array, "W"]:
    """A token of each row by logits with biases and penalties, and the likeliest by these."""
    drawn = sampling.temperature >= _TINY

    def draw() -> Array:
        temperature = jnp.where(drawn, sampling.temperature, 1.0)[:, None]
        top = _at(logits, likeliest)

        def scaled(wide: Array) -> Array:
            return (wide - top) / temperature  # at most 0: nothing overflows

        # Rows that take the likeliest token ask for no filter.
        top_k, top_p = jnp.where(drawn, sampling.top_k, 0), jnp.where(drawn, sampling.top_p, 1.0)
        possible = kept(logits, scaled, top_k, top_p, sampling.min_p)
        weights = jnp.where(possible, jnp.exp(scaled(logits.astype(jnp.float32))), 0)
        first = _argmax(weights / _waits(sampling, numbers, logits.shape[-1]))
        return jnp.where(drawn, first, likeliest)

    return jax.lax.cond(jnp.any(drawn), draw, lambda: likeliest)


def _argmax(logits: Float[Array, "W V"]) -> Int[Array, "W"]:
    """The likeliest tokens."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _at(logits: Float[Array, "W V"], tokens: Int[Array, "W"]) -> Float[Array, "W 1"]:
    """The tokens' logits in float32."""
    return jnp.take_along_axis(logits, tokens[:, None], axis=-1).astype(jnp.float32)


def _waits(sampling: Sampling, numbers: Int[Array, "W"], words: int) -> Float[Array, "W V"]:
    """Exponentially distributed numbers of each row's tokens.

    Threefry makes a key of a row's seed, choice and number; MurmurHash3's last step, taken twice, makes a number of
    the key and the token. A threefry of every token takes a hundred operations where this takes fourteen.
    """

    def key(seed: Array, choice: Array, number: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), choice)
        return jax.random.key_data(jax.random.fold_in(key, number))

    keys = jax.vmap(key)(sampling.seeds, sampling.choices, numbers)
    tokens = jax.lax.broadcasted_iota(jnp.uint32, (1, words), 1)
    bits = _mixed(_mixed(tokens ^ keys[:, :1]) ^ keys[:, 1:])
    # All 32 bits count near 0, where the short waits of rare tokens come from (jax.random.exponential takes 23).
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log1p(-uniform)


def _mixed(bits: UInt[Array, "W V"]) -> UInt[Array, "W V"]:
    """A bijection of the 32-bit numbers, of whose result each bit depends on all (MurmurHash3's fmix32)."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)


def _likeliest(logits: Float[Array, "W V"]) -> tuple[Int[Array, "W 20"], Float[Array, "W 20"]]:
    """The likeliest tokens, as `Picked` has them, and their logits.

    The k largest of all stand in the k blocks of words whose largest are the largest: only those are sorted.
    """
    rows, words = logits.shape
    blocks = jnp.pad(logits, ((0, 0), (0, -words % _BLOCK)), constant_values=-jnp.inf).reshape(rows, -1, _BLOCK)
    largest = jnp.max(blocks, axis=-1)
    _, chosen = jax.lax.top_k(largest, min(MAX_LIKELIEST, largest.shape[1]))
    chosen = jnp.sort(chosen, axis=-1)  # so that of equal tokens the lower id stays first
    candidates = jnp.take_along_axis(blocks, chosen[:, :, None], axis=1).astype(jnp.float32).reshape(rows, -1)
    values, places = jax.lax.top_k(candidates, MAX_LIKELIEST)
    ids = jnp.take_along_axis(chosen, places // _BLOCK, axis=-1) * _BLOCK + places % _BLOCK
    return jnp.where(values > -jnp.inf, ids, -1), values
