"""Rotary position embedding: the tables, once a batch; `pallas_kernels.rope` applies them."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fastjax.models.rope_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Angular velocity of each rotary pair, in radians a position.

    Args:
        rope: base and scaling.
        head_dim: D, even.

    Returns:
        float32 [D/2].

    References:
        RoFormer, arXiv 2104.09864, eq. 15; Llama 3.1's scaling as in its reference implementation: a wavelength
        longer than original/low_freq_factor is divided by `factor`, a shorter one than original/high_freq_factor
        kept, and between them the two are mixed linearly in original/wavelength; YaRN, arXiv 2309.00071, eq. 23.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequency = (1.0 / np.float32(rope.theta) ** exponent).astype(np.float32)
    if rope.kind == "default":
        return frequency
    if rope.kind == "linear":
        return (frequency / np.float32(rope.factor)).astype(np.float32)
    return _yarn(rope, frequency) if rope.kind == "yarn" else _llama3(rope, frequency)


def _llama3(rope: RopeConfig, frequency: np.ndarray) -> np.ndarray:
    assert rope.low_freq_factor and rope.high_freq_factor and rope.original_max_position_embeddings
    original = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / frequency
    smooth = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    mixed = (1 - smooth) * frequency / rope.factor + smooth * frequency
    scaled = np.where(wavelength > original / rope.low_freq_factor, frequency / rope.factor, mixed)
    return np.where(wavelength < original / rope.high_freq_factor, frequency, scaled).astype(np.float32)


def _yarn(rope: RopeConfig, frequency: np.ndarray) -> np.ndarray:
    """Pairs of many turns over the original length keep their frequency, those of few are divided by the factor."""
    assert rope.original_max_position_embeddings
    pairs, original = frequency.size, rope.original_max_position_embeddings

    def pair_of(turns: float) -> float:  # the pair, as a real number, that turns so often
        return pairs * math.log(original / (turns * 2 * math.pi)) / math.log(rope.theta)

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    ramp = (np.arange(pairs, dtype=np.float32) - np.float32(low)) / np.float32((high - low) or 0.001)
    divided = np.clip(ramp, 0, 1)
    return (frequency / np.float32(rope.factor) * divided + frequency * (1 - divided)).astype(np.float32)


def rope_tables(
    rope: RopeConfig, head_dim: int, positions: Int[Array, "B S"]
) -> tuple[Float[Array, "B S D/2"], Float[Array, "B S D/2"]]:
    """Cosine and sine of every position's angles, times the scaling's `attention_factor`, in float32.

    Args:
        rope: base and scaling.
        head_dim: D, even.
        positions: position of each token in its document.
    """
    frequency = jnp.asarray(inverse_frequencies(rope, head_dim))
    angles = positions.astype(jnp.float32)[:, :, None] * frequency[None, None, :]
    scale = jnp.float32(rope.attention_factor)
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale
