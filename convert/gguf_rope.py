"""Rotary positions as GGUF says them: base, scaling, and what llama.cpp divides the frequencies by."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from convert.errors import unexpected

_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_NEEDED = {"default": (), "linear": ("factor",), "yarn": ("factor",), "llama3": _LLAMA3}
_LISTS = ("long_factor", "short_factor")
_FULL, _SLIDING = "full_attention", "sliding_attention"
#: Families of whose graph divisors of frequencies are a part.
_WITH_DIVISORS = ("llama", "mistral")


def rope_keys(
    kind: str, config: Mapping[str, Any], file: str, head_size: int, length: int
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Keys and tensors for a model's rotary positions.

    Args:
        kind: The model_type.
        config: Contents of config.json, with the family's defaults.
        file: Its path, for messages.
        head_size: Features of a head.
        length: Tokens of a context.

    Returns:
        Name of `GGUFWriter.add_…` -> its argument; name of a tensor -> float32 array.

    Raises:
        ConvertError: A setting that is wrong, or that llama.cpp does not compute.
    """
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise unexpected(file, "rope_scaling", "an object or null", given)
    local = config.get("rope_local_base_freq", 10000.0)
    if kind in ("gemma3", "gemma3_text"):
        own = given.get(_SLIDING) or {}
        if own.get("rope_type", "default") != "default":
            raise unexpected(file, f"rope_parameters.{_SLIDING}.rope_type", "'default', for GGUF", own["rope_type"])
        local, given = own.get("rope_theta", local), given.get(_FULL, {} if own else given) or {}
    rope = _settings(kind, config, given, file)
    keys = {
        "rope_dimension_count": _turning(kind, config, rope, file, head_size),
        "rope_freq_base": float(rope["rope_theta"]),
    }
    if kind in ("gemma3", "gemma3_text"):
        keys["rope_freq_base_swa"] = _positive(file, "rope_local_base_freq", local)
    if rope["rope_type"] in ("linear", "yarn"):
        keys |= {"rope_scaling_type": rope["rope_type"], "rope_scaling_factor": float(rope["factor"])}
        if rope.get("original_max_position_embeddings"):
            keys["rope_scaling_orig_ctx_len"] = rope["original_max_position_embeddings"]
    elif kind == "cohere":
        keys["rope_scaling_type"] = "none"
    if kind == "phi3":
        return _phi3(keys, rope, file, length)
    return keys, {"rope_freqs.weight": _divisors(rope, head_size)} if rope["rope_type"] == "llama3" else {}


def _settings(kind: str, config: Mapping[str, Any], given: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Base and scaling under transformers' names."""
    rope = {"rope_theta": config["rope_theta"], **given}
    named = given.get("rope_type", given.get("type", "default"))
    needed = dict(_NEEDED)
    if kind == "phi3":
        named = "longrope" if named in ("su", "yarn") else named  # earlier names
        needed = {"default": (), "longrope": ()}
        original = "original_max_position_embeddings"
        rope[original] = rope.get(original) or config[original]
        _positive(file, original, rope[original])
    elif kind not in _WITH_DIVISORS:
        del needed["llama3"]
    if named not in needed:
        raise unexpected(file, "rope_type", f"one of {', '.join(needed)} for GGUF of {kind}", named)
    rope["rope_type"] = named
    for name in ("rope_theta", *needed[named]):
        _positive(file, f"rope: {name}", rope.get(name))
    known = {"rope_theta", "rope_type", "type", "original_max_position_embeddings", *needed[named]}
    known |= {"partial_rotary_factor", "attention_factor", *_LISTS} if kind == "phi3" else set()
    unknown = {name for name in set(rope) - known if rope[name] is not None and named != "default"}
    if unknown:
        raise unexpected(file, "rope", "no other settings, for GGUF", sorted(unknown))
    return rope


def _turning(kind: str, config: Mapping[str, Any], rope: Mapping[str, Any], file: str, head_size: int) -> int:
    """How many features of a head turn."""
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    share = 1.0 if share is None else _positive(file, "partial_rotary_factor", share)
    if share > 1 or share < 1 and kind != "phi3":
        raise unexpected(file, "partial_rotary_factor", "at most 1" if kind == "phi3" else "1, for GGUF", share)
    return int(head_size * share)


def _phi3(
    keys: dict[str, Any], rope: Mapping[str, Any], file: str, length: int
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Longrope: one divisor a pair, others beyond the original length."""
    original = rope["original_max_position_embeddings"]
    keys["rope_scaling_orig_ctx_len"] = original
    if rope["rope_type"] == "default":
        return keys, {}
    factor = rope.get("attention_factor")
    if factor is None:
        factor = math.sqrt(1 + math.log(length / original) / math.log(original)) if length > original else 1.0
    keys["rope_scaling_attn_factors"] = _positive(file, "attention_factor", factor)
    tensors = {}
    for name in _LISTS:
        values, pairs = rope.get(name), keys["rope_dimension_count"] // 2
        if not isinstance(values, list) or len(values) != pairs:
            raise unexpected(file, f"rope: {name}", f"{pairs} numbers", values)
        divisors = [_positive(file, f"rope: {name}", value) for value in values]
        tensors[f"rope_factors_{name.partition('_')[0]}.weight"] = np.array(divisors, np.float32)
    return keys, tensors


def _divisors(rope: Mapping[str, Any], head_size: int) -> np.ndarray:
    """Llama 3.1's scaling."""
    frequencies = 1.0 / rope["rope_theta"] ** (np.arange(0, head_size, 2) / head_size)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def _positive(file: str, name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e12:
        raise unexpected(file, name, "a positive number", value)
    return float(value)
