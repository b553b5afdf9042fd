"""Llama, and the families that are Llama with one thing more: a bias, a norm, a window, a multiplier, no positions."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from convert.model.families.family import ATTENTION, MLP, ConfigFamily, Reader

if TYPE_CHECKING:
    from convert.model.config import ModelConfig

LLAMA = ConfigFamily("llama", "LlamaForCausalLM", switches={"attention_bias": ATTENTION, "mlp_bias": MLP})


def types_to_hf(config: "ModelConfig") -> dict[str, Any]:
    """`layer_types` and `sliding_window` of a model some of whose layers have a window."""
    windows = [layer.sliding_window for layer in config.layers]
    return {
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in windows],
        "sliding_window": next((window for window in windows if window is not None), None),
    }


def _qwen(get: Reader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Windows from `max_window_layers` on, or as `layer_types` says, and only where `use_sliding_window` is true."""
    layers, used, first = fields["num_hidden_layers"], get.flag("use_sliding_window"), get.value("max_window_layers")
    window = get.optional_integer("sliding_window") if used else None
    get.asked.add("sliding_window")
    types = get.layer_types(layers) or [number >= first for number in range(layers)]
    return {"layers": tuple((window if sliding else None, "rope") for sliding in types)}


def _qwen_to_hf(config: "ModelConfig") -> dict[str, Any]:
    found = types_to_hf(config)
    return {**found, "use_sliding_window": found["sliding_window"] is not None}


_QWEN = {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}

QWEN2 = ConfigFamily(  # and 2.5
    "qwen2",
    "Qwen2ForCausalLM",
    defaults=_QWEN,
    constants={"biases": ("self_attn.qkv",)},
    read=_qwen,
    write=_qwen_to_hf,
)
QWEN3 = ConfigFamily(
    "qwen3",
    "Qwen3ForCausalLM",
    defaults=_QWEN,
    switches={"attention_bias": ATTENTION},
    constants={"qk_norm": "head"},
    read=_qwen,
    write=_qwen_to_hf,
)


def window_everywhere(get: Reader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """One window for all layers, or none; transformers reads past `layer_types`, which must say the same."""
    window, layers = get.optional_integer("sliding_window"), fields["num_hidden_layers"]
    types = get.layer_types(layers)
    if types is not None and set(types) != {window is not None}:
        kind = "full_attention" if window is None else "sliding_attention"
        raise get.wrong("layer_types", f"{kind} for every layer, which is what sliding_window {window} means here")
    return {"layers": ((window, "rope"),) * layers}


def window_to_hf(config: "ModelConfig") -> dict[str, Any]:
    """The way back from `window_everywhere`."""
    return {"sliding_window": config.layers[0].sliding_window}


def _ministral(get: Reader, fields: Mapping[str, Any]) -> dict[str, Any]:
    layers, window = fields["num_hidden_layers"], get.optional_integer("sliding_window")
    types = get.layer_types(layers) or [True] * layers
    return {"layers": tuple((window if sliding else None, "rope") for sliding in types)}


_MISTRAL = {"max_position_embeddings": 131072, "sliding_window": 4096}

MISTRAL = ConfigFamily("mistral", "MistralForCausalLM", defaults=_MISTRAL, read=window_everywhere, write=window_to_hf)
MINISTRAL = ConfigFamily("ministral", "MinistralForCausalLM", defaults=_MISTRAL, read=_ministral, write=types_to_hf)

GRANITE = ConfigFamily(
    "granite",
    "GraniteForCausalLM",
    defaults=dict.fromkeys(
        ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"), 1.0
    ),
    numbers={name: name for name in ("embedding_multiplier", "residual_multiplier", "attention_multiplier")},
    switches={"attention_bias": ATTENTION, "mlp_bias": MLP},
    read=lambda get, fields: {"logit_scale": 1 / get.positive("logits_scaling")},
    write=lambda config: {"logits_scaling": 1 / config.logit_scale},
)


def _smollm3(get: Reader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Layers without positions, and windows on these where `use_sliding_window` is true."""
    layers, interval = fields["num_hidden_layers"], get.integer("no_rope_layer_interval")
    turning = get.value("no_rope_layers")  # 1: the layer has positions
    if turning is None:
        turning = [int((number + 1) % interval != 0) for number in range(layers)]
    if not isinstance(turning, list) or len(turning) < layers or not all(one in (0, 1) for one in turning):
        raise get.wrong("no_rope_layers", f"{layers} of 0 and 1")
    window = get.optional_integer("sliding_window")
    window = window if get.flag("use_sliding_window") else None
    types = get.layer_types(layers) or [not one for one in turning[:layers]]
    kinds = zip(types, turning[:layers], strict=True)
    return {"layers": tuple((window if sliding else None, "rope" if one else None) for sliding, one in kinds)}


SMOLLM3 = ConfigFamily(
    "smollm3",
    "SmolLM3ForCausalLM",
    defaults={"max_position_embeddings": 32768, "rope_theta": 2e6, "no_rope_layer_interval": 4},
    switches={"attention_bias": ATTENTION, "mlp_bias": MLP},
    read=_smollm3,
    write=lambda config: {
        **_qwen_to_hf(config),
        "no_rope_layers": [int(layer.rope is not None) for layer in config.layers],
    },
    neutral={"max_window_layers": (28,)},  # Qwen's field, in the published files, with no meaning here
)
