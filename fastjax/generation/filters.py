"""Top-k, top-p and min-p of many rows at once, each by its own settings, without sorting.

A filter keeps the tokens at or above a threshold among a row's logits. Its bits are found from the highest on, four in
one pass over the logits, which counts them, or sums their probabilities, above all 15 candidates: eight passes for
float32, four for bfloat16, where a sort of 128,256 words takes a hundred. Tokens level with the last one kept are kept.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

_DIGIT = 4
"""Bits of a threshold found in one pass."""


def kept(
    logits: Float[Array, "W V"],
    scaled: Callable[[Float[Array, "W V"]], Float[Array, "W V"]],
    top_k: Int[Array, "W"],
    top_p: Float[Array, "W"],
    min_p: Float[Array, "W"],
) -> Bool[Array, "W V"]:
    """The tokens that top-k leaves, of these those that top-p leaves, of these those that min-p leaves.

    Args:
        logits: of any float dtype, one in each row above -inf.
        scaled: logits in float32 -> those over the temperature, less the largest of their row.
        top_k: the k likeliest; 0: all.
        top_p: the likeliest of this total probability, of the likeliest at least one; 1: all.
        min_p: those of at least this share of the likeliest one's probability; 0: all.
    """
    counted, summed = top_k > 0, top_p < 1

    def by_count() -> Array:
        found = _threshold(logits, jnp.ones_like, top_k.astype(jnp.float32))
        return jnp.where(counted, found, -jnp.inf)

    def by_mass(least: Array) -> Array:
        def weights(wide: Array) -> Array:
            return jnp.where(wide >= least[:, None], jnp.exp(scaled(wide)), 0)

        sums = jnp.sum(weights(logits.astype(jnp.float32)), axis=-1)
        mass = jnp.maximum(top_p * sums, jnp.finfo(jnp.float32).tiny)
        return jnp.where(summed, jnp.maximum(_threshold(logits, weights, mass), least), least)

    least = jax.lax.cond(jnp.any(counted), by_count, lambda: jnp.full_like(top_p, -jnp.inf))
    least = jax.lax.cond(jnp.any(summed), by_mass, lambda least: least, least)
    # Made here and not above: what a branch takes from outside is an array in memory.
    wide = logits.astype(jnp.float32)
    return (wide >= least[:, None]) & (scaled(wide) >= jnp.log(min_p)[:, None])


def _threshold(
    values: Float[Array, "W V"],
    weights: Callable[[Float[Array, "W V"]], Float[Array, "W V"]],
    wanted: Float[Array, "W"],
) -> Float[Array, "W"]:
    """The largest number so that the weights of the values at or above it add up to what is wanted; -inf: none does.

    Counts are exact; other sums are those of float32.

    Args:
        values: of any float dtype.
        weights: of values in float32; none is negative.
        wanted: above 0.
    """
    passes = -(-(9 + jnp.finfo(values.dtype).nmant) // _DIGIT)  # of sign, exponent in float32, and fraction
    digits = jnp.arange(1, 2**_DIGIT, dtype=jnp.uint32)

    def refine(done: Array, order: Array) -> Array:
        shift = (32 - _DIGIT * (done + 1)).astype(jnp.uint32)
        least = _number(order[:, None] + (digits << shift)[None, :])
        wide = values.astype(jnp.float32)
        weight = weights(wide)  # computed in each pass: an array of them would be read as often
        parts = tuple(jnp.where(wide >= least[:, n : n + 1], weight, 0) for n in range(len(digits)))
        sums = jax.lax.reduce(parts, (np.float32(0),) * len(parts), _add, (1,))  # one pass for all
        return order + (sum((one >= wanted).astype(jnp.uint32) for one in sums) << shift)

    return _number(jax.lax.fori_loop(0, passes, refine, jnp.zeros(len(values), jnp.uint32)))


def _add(left: tuple[Array, ...], right: tuple[Array, ...]) -> tuple[Array, ...]:
    return tuple(a + b for a, b in zip(left, right, strict=True))


def _number(order: UInt[Array, "..."]) -> Float[Array, "..."]:
    """The float32 at a place in the order of all: from -inf, which is at the first places too, to NaN beyond inf."""
    order = jnp.maximum(order, jnp.uint32(0x007FFFFF))
    bits = jnp.where(order >> 31 == 1, order ^ jnp.uint32(0x80000000), ~order)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
