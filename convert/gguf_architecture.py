"""llama.cpp's hyper-parameters of a model; models that it cannot compute are refused.

`convert.families.gguf.Architecture` lists what llama.cpp fixes; a deviation is refused by the field's name.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.errors import unexpected
from convert.families import FAMILIES, Family
from convert.families.gguf import Architecture
from convert.families.mapping import read_config
from convert.gguf_delta import delta_keys
from convert.model.config import ModelConfig
from convert.model.layers import GatedDelta
from convert.model.reader import FULL, SLIDING, Reader
from convert.model.rope import RopeConfig

ARCHITECTURES = {name: family.gguf for name, family in FAMILIES.items() if isinstance(family.gguf, Architecture)}


@dataclass(frozen=True)
class HyperParameters:
    """A model's metadata in a GGUF file.

    Attributes:
        architecture: Its name in llama.cpp.
        keys: Name of `GGUFWriter.add_…` -> argument.
        tensors: Name -> float32 array absent from checkpoints: divisors of rotary frequencies.
        heads: "q_proj" and "k_proj" -> number of heads.
        notes: Remaining differences of llama.cpp, in sentences.
        delta: Settings of the recurrent layers; None: There are none.
    """

    architecture: Architecture
    keys: Mapping[str, Any]
    tensors: Mapping[str, np.ndarray]
    heads: Mapping[str, int]
    notes: tuple[str, ...]
    delta: GatedDelta | None = None


def hyper_parameters(family: Family, config: Mapping[str, Any], file: str) -> HyperParameters:
    """Map a config.json to llama.cpp's hyper-parameters.

    Args:
        family: The model's family.
        config: Contents of config.json.
        file: Its path, for messages.

    Raises:
        ConvertError: llama.cpp lacks the architecture or computes it differently; the message names the field.
    """
    architecture = family.gguf
    if not isinstance(architecture, Architecture):
        expected = f"one of {', '.join(ARCHITECTURES)} for GGUF ({architecture})"
        raise unexpected(file, "model_type", expected, family.model_type)
    model, get = read_config(config, where=file), family.reader(config, file)
    length = get.integer("model_max_length", model.max_position_embeddings)
    _check(architecture, family, model, get)
    rope, tensors = _rope_keys(architecture, model, file)
    windows, notes = _windows(architecture, model, get, length)
    keys = {
        "context_length": length,
        "embedding_length": model.hidden_size,
        "block_count": model.num_hidden_layers,
        "feed_forward_length": model.intermediate_size,
        "head_count": model.num_attention_heads,
        "head_count_kv": model.num_key_value_heads,
        "key_length": model.head_dim,
        "value_length": model.head_dim,
        **(delta_keys(model, get) if architecture.recurrent else {}),
        **_mixture_keys(model),
        "layer_norm_eps" if model.norm == "layer" else "layer_norm_rms_eps": model.norm_eps,
        **{key: get.positive(name) for name, key in architecture.numbers.items()},
        **{key: value for name, key in architecture.optional.items() if (value := get.optional_number(name))},
        **rope,
        **windows,
    }
    if family.section is not None:
        notes.append("the vision tower is left out")
    heads = {"q_proj": model.num_attention_heads, "k_proj": model.num_key_value_heads}
    delta = model.recurrent[0] if architecture.recurrent else None
    return HyperParameters(architecture, keys, tensors, heads, tuple(notes), delta)


def _check(architecture: Architecture, family: Family, model: ModelConfig, get: Reader) -> None:
    """Refuse settings that llama.cpp computes differently."""
    layers, name, heads = model.num_hidden_layers, architecture.name, model.num_attention_heads
    means = f"which {name} means in llama.cpp"
    if model.hidden_act != architecture.activation:
        raise get.wrong(family.name("hidden_act"), f"{architecture.activation!r}, {means}")
    if architecture.square and heads * model.head_dim != model.hidden_size:
        wanted = f"{model.hidden_size // heads}: in llama.cpp {name}'s heads fill its width"
        raise unexpected(get.where, "head_dim", wanted, model.head_dim)
    if architecture.query_scale:
        wanted = model.hidden_size // heads if layers == architecture.wide else model.head_dim
        if get.value("query_pre_attn_scalar") != wanted:
            raise get.wrong("query_pre_attn_scalar", f"{wanted}, {means}")
    missing = set(architecture.biases) - model.biases if architecture.biased else ()
    if missing:
        raise unexpected(get.where, "biases", f"those of {', '.join(sorted(architecture.biases))}, {means}", "none")
    for cap in ("attn_logit_softcapping", "final_logit_softcapping", "clip_qkv"):
        if cap not in {*architecture.numbers, *architecture.optional} and getattr(model, cap) is not None:
            raise get.wrong(cap, "null, for GGUF")
    if not architecture.tied and model.tie_word_embeddings:
        raise get.wrong("tie_word_embeddings", f"false: llama.cpp's {name} has a head of its own")
    if not architecture.grouped and model.num_key_value_heads != heads:
        raise get.wrong("num_key_value_heads", f"{heads}, one a head, {means}")
    if model.moe is not None and model.moe.router.normalize != architecture.normalizes:
        raise get.wrong("norm_topk_prob", f"{str(architecture.normalizes).lower()}, {means}")
    dense = [number for number, one in enumerate(model.mixtures) if model.moe is not None and not one]
    if dense:
        raise unexpected(get.where, "mixtures", f"one in every layer, {means}", f"layers {dense[:8]} without")
    if architecture.qk_norm_from is not None and (model.qk_norm is not None) != (layers >= architecture.qk_norm_from):
        raise get.wrong(
            "use_qk_norm", f"{str(layers >= architecture.qk_norm_from).lower()} with {layers} layers, {means}"
        )
    free = [
        i for i in range(layers) if architecture.position_free is not None and (i + 1) % architecture.position_free == 0
    ]
    if free != [i for i, mixer in enumerate(model.attention) if mixer.rope is None]:
        raise get.wrong("no_rope_layers", f"0 for each {architecture.position_free}th layer alone, for GGUF")


def _mixture_keys(model: ModelConfig) -> dict[str, Any]:
    """Keys of mixtures of experts."""
    if model.moe is None:
        return {}
    shared = model.moe.shared_intermediate_size
    return {
        "expert_count": model.moe.router.num_experts,
        "expert_used_count": model.moe.router.experts_per_token,
        "expert_feed_forward_length": model.moe.intermediate_size,
        **({"expert_shared_feed_forward_length": shared} if shared else {}),
        **({"expert_gating_func": 2} if model.moe.router.score == "sigmoid" else {}),
    }


def _windows(
    architecture: Architecture, model: ModelConfig, get: Reader, length: int
) -> tuple[dict[str, Any], list[str]]:
    """Keys of the windows; a note where llama.cpp ignores them."""
    windows = [mixer.sliding_window for mixer in model.attention]
    window = next((window for window in windows if window is not None), None)
    if architecture.period is not None:
        kinds = [FULL if (i + 1) % architecture.period == 0 else SLIDING for i in range(model.num_hidden_layers)]
        if window is None:
            raise get.wrong("sliding_window", "a positive integer, for GGUF")
        if kinds != [FULL if one is None else SLIDING for one in windows]:
            wanted = (
                f"a window in all layers but each {architecture.period}th, which {architecture.name} means in llama.cpp"
            )
            raise get.wrong("layer_types", wanted)
        return {"sliding_window": window}, []
    notes = []
    if window is not None and window < length:
        notes.append(f"llama.cpp leaves out the window of {window} tokens: longer texts come out otherwise")
    return {"sliding_window": window or 0} if architecture.window else {}, notes


def _rope_keys(
    architecture: Architecture, model: ModelConfig, file: str
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Keys and float32 tensors of rotary positions, among them llama.cpp's divisors of the frequencies."""
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
