"""Gemma 2: Gemma with normalisations on both sides of each block, capped scores and logits, alternating windows."""

from collections.abc import Mapping
from typing import Any

from convert.families.family import Family
from convert.families.gemma import ATTENDS_BACKWARD_ONLY, BIASES, TANH, scaled
from convert.families.gguf import Architecture
from convert.families.windows import windows
from convert.model.reader import Reader

CONSTANTS = {
    "norm_offset": 1.0,
    "attention_norms": ("input_layernorm", "post_attention_layernorm"),
    "mlp_norms": ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
}
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def query_scale(get: Reader) -> dict[str, Any]:
    """Scores times query_pre_attn_scalar^-½."""
    return {"attention_multiplier": get.integer("query_pre_attn_scalar") ** -0.5}


def _read(get: Reader, fields: Mapping[str, Any]) -> dict[str, Any]:
    get.asked.add("hidden_act")  # hidden_activation takes precedence
    return {**scaled(fields), **query_scale(get), **windows(get, fields, lambda number: number % 2 == 0)}


GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    defaults={
        "tie_word_embeddings": True,
        "head_dim": 256,
        "num_key_value_heads": 4,
        "hidden_activation": TANH,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    names={"hidden_act": "hidden_activation"},
    numbers={name: name for name in _CAPS},
    switches=BIASES,
    constants=CONSTANTS,
    read=_read,
    neutral=ATTENDS_BACKWARD_ONLY,
    gguf=Architecture(
        "GEMMA2",
        activation=TANH,
        norm_shift=1.0,
        period=2,
        wide=46,
        query_scale=True,
        numbers={name: name for name in _CAPS},
    ),
)
