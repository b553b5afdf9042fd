"""Ministral 3: Mistral with queries that grow with their position (Llama 4's scaling)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from convert.families.family import Family
from convert.families.windows import window_everywhere
from convert.model.reader import Reader
from convert.model.rope import NAMES, parse_rope
from convert.rope import NEW, OLD, ORIGINAL, rope_settings

_BETA = "llama_4_scaling_beta"
_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    ORIGINAL: 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    _BETA: 0.1,
}


def _read(get: Reader, fields: Mapping[str, Any]) -> dict[str, Any]:
    get.asked |= NAMES
    positions = fields["max_position_embeddings"]
    given = any(get.config.get(field) is not None for field in (NEW, OLD))
    config = get.config if given else {**get.config, NEW: _ROPE}
    settings = rope_settings(config, get.where, theta=get.defaults["rope_theta"], positions=positions)
    beta = settings.values.pop(_BETA, None)
    settings.values.pop("max_position_embeddings", None)  # transformers ignores it
    rope = parse_rope(settings, get.where, positions=positions, head_dim=fields["head_dim"])
    # the scale of queries counts in original lengths, whether or not the scaling of positions does
    original = rope.original_max_position_embeddings or settings.values.get(ORIGINAL)
    where = Reader({_BETA: beta, ORIGINAL: original}, f"{get.where}: {settings.field}", {})
    scaled = {ORIGINAL: where.integer(ORIGINAL), "query_beta": where.number(_BETA)}
    return {**window_everywhere(get, fields), "rope": dataclasses.replace(rope, **scaled)}


MINISTRAL3 = Family(
    "ministral3",
    "Ministral3ForCausalLM",
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
    },
    read=_read,
    gguf="its files have not been compared with llama.cpp",
)
