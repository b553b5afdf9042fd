"""Rotary position embedding: the tables, once a batch; `pallas_kernels.rope` applies them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from convert.model.config import ModelConfig
from convert.model.rope import BY_LENGTH, RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Angular velocity of each rotary pair, in radians a position, in documents up to the original length.

    Args:
        rope: base and scaling.
        head_dim: D, even.

    Returns:
        float32 [R/2], R = D or its rotated part.

    References:
        RoFormer, arXiv 2104.09864, eq. 15; Llama 3.1's scaling as in its reference implementation: a wavelength
        longer than original/low_freq_factor is divided by `factor`, one shorter than original/high_freq_factor is
        kept, and between them the two are mixed linearly in original/wavelength; YaRN, arXiv 2309.00071, eq. 23.
    """
    frequency = (1.0 / np.float32(rope.theta) ** _exponents(rope, head_dim)).astype(np.float32)
    if rope.kind in ("default", "dynamic"):
        return frequency
    if rope.kind == "linear":
        return (frequency / np.float32(rope.factor)).astype(np.float32)
    if rope.kind == "longrope":
        return (frequency / np.asarray(rope.short_factor, np.float32)).astype(np.float32)
    return _yarn(rope, frequency) if rope.kind == "yarn" else _llama3(rope, frequency)


def _exponents(rope: RopeConfig, head_dim: int) -> np.ndarray:
    turning = rope.base_dim(head_dim)
    return np.arange(0, turning, 2, dtype=np.float32) / np.float32(turning)


def _llama3(rope: RopeConfig, frequency: np.ndarray) -> np.ndarray:
    assert rope.low_freq_factor and rope.high_freq_factor and rope.original_max_position_embeddings
    original = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / frequency
    smooth = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    mixed = (1 - smooth) * frequency / rope.factor + smooth * frequency
    scaled = np.where(wavelength > original / rope.low_freq_factor, frequency / rope.factor, mixed)
    return np.where(wavelength < original / rope.high_freq_factor, frequency, scaled).astype(np.float32)


def _yarn(rope: RopeConfig, frequency: np.ndarray) -> np.ndarray:
    """Keep the frequencies of fast pairs, divide those of slow pairs by the factor, and blend in between."""
    assert rope.original_max_position_embeddings
    pairs, original = frequency.size, rope.original_max_position_embeddings

    def pair_of(turns: float) -> float:  # the pair, as a real number, with so many turns
        return pairs * math.log(original / (turns * 2 * math.pi)) / math.log(rope.theta)

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    ramp = (np.arange(pairs, dtype=np.float32) - np.float32(low)) / np.float32((high - low) or 0.001)
    divided = np.clip(ramp, 0, 1)
    return (frequency / np.float32(rope.factor) * divided + frequency * (1 - divided)).astype(np.float32)


def frequencies_by_length(rope: RopeConfig, head_dim: int, lengths: Int[Array, "B S"]) -> Float[Array, "B S R/2"]:
    """Angular velocities of "dynamic" and "longrope", by the length of each token's document.

    Args:
        rope: base and scaling.
        head_dim: D, even.
        lengths: tokens of the document.

    References:
        "dynamic": the NTK-aware base of transformers; "longrope": LongRoPE, arXiv 2402.13753.
    """
    assert rope.original_max_position_embeddings
    original = rope.original_max_position_embeddings
    usual = jnp.asarray(inverse_frequencies(rope, head_dim))[None, None, :]
    if rope.kind == "longrope":
        ratio = np.asarray(rope.short_factor, np.float32) / np.asarray(rope.long_factor, np.float32)
        return jnp.where((lengths > original)[:, :, None], usual * jnp.asarray(ratio)[None, None, :], usual)
    turning = rope.base_dim(head_dim)
    longer = jnp.maximum(lengths, original).astype(jnp.float32) / original
    growth = (rope.factor * longer - (rope.factor - 1)) ** (turning / (turning - 2))
    return usual / growth[:, :, None] ** jnp.asarray(_exponents(rope, head_dim))[None, None, :]


def document_lengths(positions: Int[Array, "B S"], segment_ids: Int[Array, "B S"] | None) -> Int[Array, "B S"]:
    """The length of each token's document: one more than its last position.

    Args:
        positions: position of each token in its document, counted from 0.
        segment_ids: document of each token, each in one piece; None: every row is one document.
    """
    if segment_ids is None:
        return jnp.broadcast_to(jnp.max(positions, axis=1, keepdims=True) + 1, positions.shape)
    length = positions.shape[1]
    places = jnp.arange(length, dtype=jnp.int32)[None, :]
    ends = jnp.concatenate(
        [segment_ids[:, 1:] != segment_ids[:, :-1], jnp.ones_like(segment_ids[:, :1], dtype=bool)], axis=1
    )
    last = jax.lax.cummin(jnp.where(ends, places, length), axis=1, reverse=True)
    return jnp.take_along_axis(positions, last, axis=1) + 1


def rope_tables(
    rope: RopeConfig, head_dim: int, positions: Int[Array, "B S"], lengths: Int[Array, "B S"] | None = None
) -> tuple[Float[Array, "B S R/2"], Float[Array, "B S R/2"]]:
    """Cosine and sine of every position's angles, times the scaling's `attention_factor`, in float32.

    Args:
        rope: base and scaling.
        head_dim: D, even.
        positions: position of each token in its document.
        lengths: tokens of that document; only a scaling in `BY_LENGTH` needs it.
    """
    if rope.kind in BY_LENGTH:
        assert lengths is not None, f"{rope.kind} scaling needs the documents' lengths"
        frequency = frequencies_by_length(rope, head_dim, lengths)
    else:
        frequency = jnp.asarray(inverse_frequencies(rope, head_dim))[None, None, :]
    angles = positions.astype(jnp.float32)[:, :, None] * frequency
    scale = jnp.float32(rope.attention_factor)
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rope_fields(config: ModelConfig) -> dict[str, RopeConfig]:
    """The fields of `ModelConfig` with the rotary positions of its layers, by name."""
    names = dict.fromkeys(mixer.rope for mixer in config.attention if mixer.rope is not None)
    return {name: getattr(config, name) for name in names}


def query_scales(config: ModelConfig, positions: Int[Array, "B S"]) -> dict[str, Float[Array, "B S"]]:
    """Factors of the rotated queries, growing with position, for the fields of `ModelConfig` that have any.

    Args:
        config: the model's.
        positions: position of each token in its document.

    References:
        `RopeConfig.query_beta`; Llama 4's attention temperature, as Ministral 3 has it.
    """
    scales = {}
    for name, rope in rope_fields(config).items():
        if rope.query_beta is not None:
            assert rope.original_max_position_embeddings, "query_beta counts in original lengths"
            lengths = (positions // rope.original_max_position_embeddings).astype(jnp.float32)
            scales[name] = 1.0 + rope.query_beta * jnp.log1p(lengths)
    return scales
