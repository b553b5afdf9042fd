"""Gemma 3: Gemma 2 with normalised queries and keys, rotary positions by layer type, and an optional vision tower."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from convert.families.family import Family
from convert.families.gemma import ATTENDS_BACKWARD_ONLY, BIASES, TANH, scaled
from convert.families.gemma2 import CONSTANTS, query_scale
from convert.families.gguf import Architecture
from convert.families.vision_tower import by_file
from convert.families.windows import windows
from convert.model.reader import Reader
from convert.model.rope import read_ropes


def _read(get: Reader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """One full layer after every five windowed ones, which have rotary positions of their own."""
    get.asked |= {"hidden_act", "rope_local_base_freq"}
    period = get.integer("sliding_window_pattern")
    mixers = windows(get, fields, lambda number: (number + 1) % period != 0, required=True, local_rope=True)
    return {**scaled(fields), **query_scale(get), **read_ropes(get, fields), **mixers}


GEMMA3_TEXT = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    # Text-only checkpoints on the Hub leave out the 4B model's values.
    defaults={
        "tie_word_embeddings": True,
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": TANH,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    names={"hidden_act": "hidden_activation"},
    numbers={"final_logit_softcapping": "final_logit_softcapping"},
    switches=BIASES,
    constants={**CONSTANTS, "qk_norm": "head"},
    read=_read,
    neutral={**ATTENDS_BACKWARD_ONLY, "attn_logit_softcapping": (None,)},
    classifier="Gemma3TextForSequenceClassification",
    gguf=Architecture("GEMMA3", activation=TANH, norm_shift=1.0, period=6, wide=62, query_scale=True),
)

#: transformers caps the logits of the text model by itself alone.
GEMMA3 = by_file(dataclasses.replace(GEMMA3_TEXT, numbers={}), "gemma3")
