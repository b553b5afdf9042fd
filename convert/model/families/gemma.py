"""Gemma 1, 2 and 3: scaled embeddings, norms of 1 + weight, and then ever more."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from convert.model.families.family import ATTENTION, ROPE, ConfigFamily, Reader
from convert.model.families.llama import types_to_hf
from convert.model.rope import parse_rope, rope_to_hf
from convert.rope import FULL, SLIDING, rope_settings_by_layer

if TYPE_CHECKING:
    from convert.model.config import ModelConfig

_DEFAULTS = {"hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 8192}
_ATTENDS_BACKWARD_ONLY = {"use_bidirectional_attention": (None, False)}
_AROUND = {
    "norm_offset": 1.0,
    "attention_norms": ("input_layernorm", "post_attention_layernorm"),
    "mlp_norms": ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
}


def _scaled(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"embedding_multiplier": fields["hidden_size"] ** 0.5}


def _gemma(get: Reader, fields: Mapping[str, Any]) -> dict[str, Any]:
    get.asked.add("hidden_activation")  # transformers reads hidden_act and takes its "gelu" for the approximation
    act = {"hidden_act": "gelu_pytorch_tanh"} if get.value("hidden_act") == "gelu" else {}
    return {**_scaled(fields), **act}


GEMMA = ConfigFamily(
    "gemma",
    "GemmaForCausalLM",
    defaults=_DEFAULTS,
    switches={"attention_bias": ATTENTION},
    constants={"norm_offset": 1.0},
    read=_gemma,
    write=lambda config: {"hidden_act": "gelu_python"} if config.hidden_act == "gelu" else {},
    neutral=_ATTENDS_BACKWARD_ONLY,
)


def _query_scale(get: Reader) -> dict[str, Any]:
    return {"attention_multiplier": get.integer("query_pre_attn_scalar") ** -0.5}


def _gemma2(get: Reader, fields: Mapping[str, Any]) -> dict[str, Any]:
    get.asked.add("hidden_act")  # hidden_activation counts
    layers, window = fields["num_hidden_layers"], get.optional_integer("sliding_window")
    types = get.layer_types(layers) or [number % 2 == 0 for number in range(layers)]
    kinds = tuple((window if sliding else None, "rope") for sliding in types)
    return {**_scaled(fields), **_query_scale(get), "layers": kinds}


def _gemma2_to_hf(config: "ModelConfig") -> dict[str, Any]:
    return {**types_to_hf(config), "query_pre_attn_scalar": round(config.attention_multiplier**-2)}


GEMMA2 = ConfigFamily(
    "gemma2",
    "Gemma2ForCausalLM",
    defaults={
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    names={"hidden_act": "hidden_activation"},
    numbers={name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")},
    switches={"attention_bias": ATTENTION},
    constants=_AROUND,
    read=_gemma2,
    write=_gemma2_to_hf,
    neutral=_ATTENDS_BACKWARD_ONLY,
)

_KINDS = {"rope": FULL, "local_rope": SLIDING}


def _gemma3(get: Reader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """A full layer after every five with a window, which have rotary positions of their own."""
    get.asked |= ROPE | {"hidden_act", "rope_local_base_freq"}
    layers, window = fields["num_hidden_layers"], get.optional_integer("sliding_window")
    period = get.integer("sliding_window_pattern")
    types = get.layer_types(layers) or [(number + 1) % period != 0 for number in range(layers)]
    kinds = tuple((window, "local_rope") if sliding else (None, "rope") for sliding in types)
    if window is None and any(types):
        raise get.wrong("sliding_window", "a positive integer, as there are layers with a window")
    positions = fields["max_position_embeddings"]
    settings = rope_settings_by_layer(
        get.config,
        get.where,
        theta=get.defaults["rope_theta"],
        local_theta=get.defaults["rope_local_base_freq"],
        positions=positions,
    )
    ropes = {
        name: parse_rope(settings[layers], get.where, positions=positions, head_dim=fields["head_dim"])
        for name, layers in _KINDS.items()
    }
    return {**_scaled(fields), **_query_scale(get), **ropes, "layers": kinds}


GEMMA3_TEXT = ConfigFamily(
    "gemma3_text",
    "Gemma3ForCausalLM",
    defaults={
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    names={"hidden_act": "hidden_activation"},
    numbers={"final_logit_softcapping": "final_logit_softcapping"},
    switches={"attention_bias": ATTENTION},
    constants={**_AROUND, "qk_norm": "head"},
    read=_gemma3,
    write=lambda config: {
        **_gemma2_to_hf(config),
        "rope_parameters": {kind: rope_to_hf(getattr(config, name)) for name, kind in _KINDS.items()},
    },
    neutral={**_ATTENDS_BACKWARD_ONLY, "attn_logit_softcapping": (None,)},
)
