"""Muse Glimmer: gated attention, unscaled norms of embeddings, queries and keys, full layers without positions."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from convert.families.family import Family
from convert.families.gemma import ATTENDS_BACKWARD_ONLY
from convert.families.gemma2 import CONSTANTS
from convert.families.vision_tower import by_class
from convert.families.windows import windows
from convert.model.reader import Reader
from convert.model.rope import read_rope
from convert.model.spec import ATTENTION_GROUPS


def _read(get: Reader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Every fourth layer, counted from the last, is full and without positions, unless lists say otherwise."""
    layers, rope = fields["num_hidden_layers"], read_rope(get, fields)
    local = [(layers - 1 - number) % 4 != 0 for number in range(layers)]
    turning = get.value("layer_rope_theta")  # 0: the layer has no positions; another base is ignored by transformers
    turning = [one * rope.theta for one in local] if turning is None else turning
    if not isinstance(turning, list) or len(turning) != layers or not all(one in (0, rope.theta) for one in turning):
        raise get.wrong("layer_rope_theta", f"{layers} of 0 and rope_theta, {rope.theta}")
    if fields["tie_word_embeddings"]:
        raise get.wrong("tie_word_embeddings", "false: transformers does not tie them")
    mixers = windows(get, fields, lambda number: local[number], required=True)["mixers"]
    return {
        "rope": rope,
        "mixers": tuple(
            dataclasses.replace(mixer, rope="rope" if one else None) for mixer, one in zip(mixers, turning, strict=True)
        ),
        "attention_multiplier": get.positive("qk_scale_factor") * fields["attention_multiplier"],
        "post_norm_eps": get.number("post_norm_eps"),
    }


_TEXT = Family(
    "muse_glimmer_text",
    "MuseGlimmerForConditionalGeneration",
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "hidden_activation": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "post_norm_eps": 1e-8,
        "sliding_window": 2048,
        "final_logit_softcapping": 20.0,
        "qk_scale_factor": 3.87,
        "output_multiplier": 0.19611613513818404,
    },
    names={"hidden_act": "hidden_activation"},
    numbers={"final_logit_softcapping": "final_logit_softcapping", "logit_scale": "output_multiplier"},
    switches={"attention_bias": ATTENTION_GROUPS},
    constants={**CONSTANTS, "qk_norm": "unscaled head", "attention_gate": "projection", "embedding_norm": True},
    final_norm="scale",
    read=_read,
    neutral=ATTENDS_BACKWARD_ONLY,
    gguf="llama.cpp has no such architecture",
)
MUSE_GLIMMER = by_class(_TEXT, "muse_glimmer", ("vision_tower", "vision_adapter", "vision_projection"))
