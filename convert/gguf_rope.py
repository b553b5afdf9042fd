"""Rotary positions as GGUF says them: base, scaling, and what llama.cpp divides the frequencies by."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from convert.errors import unexpected
from convert.families.table import size
from convert.rope import FULL, NEW, ORIGINAL, SLIDING, rope_settings, rope_settings_by_layer

_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_NEEDED = {"default": (), "linear": ("factor",), "yarn": ("factor",), "llama3": _LLAMA3}
_LISTS = ("long_factor", "short_factor")
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
    local, positions = None, size(config, "max_position_embeddings", file)
    if kind in ("gemma3", "gemma3_text"):
        found = rope_settings_by_layer(config, file, theta=config["rope_theta"], local_theta=1e4, positions=positions)
        given, local = found[FULL].values, found[SLIDING].values
        if local["rope_type"] != "default":
            raise unexpected(file, f"{NEW}.{SLIDING}.rope_type", "'default', for GGUF", local["rope_type"])
    else:
        theta = config["rope_theta"]
        given = rope_settings(config, file, theta=theta, positions=positions, phi3=kind == "phi3").values
    rope = _settings(kind, config, given, file)
    keys = {
        "rope_dimension_count": _turning(kind, rope, file, head_size),
        "rope_freq_base": float(rope["rope_theta"]),
    }
    if local is not None:
        keys["rope_freq_base_swa"] = _positive(file, "rope_local_base_freq", local["rope_theta"])
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
    rope, named = dict(given), given["rope_type"]
    needed = dict(_NEEDED)
    if kind == "phi3":
        needed = {"default": (), "longrope": ()}
        rope.setdefault(ORIGINAL, config[ORIGINAL])
        _positive(file, ORIGINAL, rope[ORIGINAL])
    elif named == "llama3" and rope.get(ORIGINAL) is None:
        rope[ORIGINAL] = config["max_position_embeddings"]
    if kind not in (*_WITH_DIVISORS, "phi3"):
        del needed["llama3"]
    if named not in needed:
        raise unexpected(file, "rope_type", f"one of {', '.join(needed)} for GGUF of {kind}", named)
    for name in ("rope_theta", *needed[named]):
        _positive(file, f"rope: {name}", rope.get(name))
    if rope.get(ORIGINAL) is not None and named != "default":
        size(rope, ORIGINAL, file)
    known = {"rope_theta", "rope_type", "partial_rotary_factor", ORIGINAL, *needed[named]}
    known |= {"attention_factor", *_LISTS} if kind == "phi3" else set()
    unknown = {name for name in set(rope) - known if rope[name] is not None and named != "default"}
    if unknown:
        raise unexpected(file, "rope", "no other settings, for GGUF", sorted(unknown))
    return rope


def _turning(kind: str, rope: Mapping[str, Any], file: str, head_size: int) -> int:
    """How many features of a head turn: a part of them in Phi-3 alone, elsewhere transformers leaves the part out."""
    share = rope.get("partial_rotary_factor")
    if kind != "phi3" and rope["rope_type"] == "default":
        return head_size
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
