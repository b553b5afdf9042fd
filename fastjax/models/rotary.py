"""Rotary position embedding: the tables, once a batch; `pallas_kernels.rope` applies them."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fastjax.models.config import RopeConfig


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
        kept, and between them the two are mixed linearly in original/wavelength.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequency = (1.0 / np.float32(rope.theta) ** exponent).astype(np.float32)
    if rope.kind == "default":
        return frequency
    assert rope.factor and rope.low_freq_factor and rope.high_freq_factor and rope.original_max_position_embeddings
    original = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / frequency
    smooth = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    mixed = (1 - smooth) * frequency / rope.factor + smooth * frequency
    scaled = np.where(wavelength > original / rope.low_freq_factor, frequency / rope.factor, mixed)
    return np.where(wavelength < original / rope.high_freq_factor, frequency, scaled).astype(np.float32)


def rope_tables(
    rope: RopeConfig, head_dim: int, positions: Int[Array, "B S"]
) -> tuple[Float[Array, "B S D/2"], Float[Array, "B S D/2"]]:
    """Cosine and sine of every position's angles, in float32.

    Args:
        rope: base and scaling.
        head_dim: D, even.
        positions: position of each token in its document.
    """
    frequency = jnp.asarray(inverse_frequencies(rope, head_dim))
    angles = positions.astype(jnp.float32)[:, :, None] * frequency[None, None, :]
    return jnp.cos(angles), jnp.sin(angles)
