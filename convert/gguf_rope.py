"""Rotary positions in GGUF: base, scaling, and llama.cpp's divisors of the frequencies."""

import math
from typing import Any

import numpy as np

from convert.errors import unexpected
from convert.families.gguf import Architecture
from convert.model.config import ModelConfig
from convert.model.rope import RopeConfig


def rope_keys(
    architecture: Architecture, model: ModelConfig, file: str
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Keys and tensors of a model's rotary positions.

    Args:
        architecture: The model's in llama.cpp.
        model: The model.
        file: Path of config.json, for messages.

    Returns:
        Name of `GGUFWriter.add_…` -> argument; tensor name -> float32 array.

    Raises:
        ConvertError: A setting without a counterpart in llama.cpp.
    """
    rope, local = model.rope, model.local_rope
    if rope.kind not in architecture.scalings:
        raise unexpected(
            file, "rope_type", f"one of {', '.join(architecture.scalings)} for GGUF of {architecture.name}", rope.kind
        )
    plain = RopeConfig(rope.theta, rope.kind)
    beyond = ("beta_fast", "beta_slow", "truncate")
    others = sorted(name for name in beyond if getattr(rope, name) != getattr(plain, name))
    if rope.kind == "yarn" and rope.attention_factor != 0.1 * math.log(max(rope.factor, 1.0)) + 1.0:
        others.append("attention_factor")
    if others:
        raise unexpected(file, "rope", "no other settings, for GGUF", others)
    keys: dict[str, Any] = {
        "rope_dimension_count": rope.rotary_dim(model.head_dim),
        "rope_freq_base": rope.theta,
    }
    if local is not None:
        if local.kind != "default":
            raise unexpected(file, "the windows' rope_type", "'default', for GGUF", local.kind)
        keys["rope_freq_base_swa"] = local.theta
    if rope.base_dim(model.head_dim) % 2:
        raise unexpected(
            file, "partial_rotary_factor", "an even number of turning features, for GGUF", rope.partial_rotary_factor
        )
    original = rope.original_max_position_embeddings
    if rope.kind in ("linear", "yarn"):
        keys |= {"rope_scaling_type": rope.kind, "rope_scaling_factor": rope.factor}
        if original is not None:
            keys["rope_scaling_orig_ctx_len"] = original
    elif architecture.scaling_named:
        keys["rope_scaling_type"] = "none"
    if architecture.original:
        keys["rope_scaling_orig_ctx_len"] = original or model.max_position_embeddings
    if rope.kind == "longrope":
        keys["rope_scaling_attn_factors"] = rope.attention_factor
        divisors = {"long": rope.long_factor, "short": rope.short_factor}
        return keys, {f"rope_factors_{name}.weight": np.array(of, np.float32) for name, of in divisors.items()}
    return keys, {"rope_freqs.weight": _divisors(rope, model.head_dim)} if rope.kind == "llama3" else {}


def _divisors(rope: RopeConfig, head_size: int) -> np.ndarray:
    """Divisors of Llama 3.1's scaling."""
    original, low, high = rope.original_max_position_embeddings, rope.low_freq_factor, rope.high_freq_factor
    assert original is not None and low is not None and high is not None, "llama3 has all of these"
    frequencies = 1.0 / rope.theta ** (np.arange(0, head_size, 2) / head_size)
    turns = original * frequencies / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / rope.factor + smooth)).astype(np.float32)
