"""Ministral 3: Mistral with queries that grow with their position (Llama 4's scaling)."""

from collections.abc import Mapping
from typing import Any

from convert.families.family import NOT_COMPARED, Family
from convert.families.windows import window_everywhere
from convert.model.reader import Reader
from convert.model.rope import QUERY_BETA, read_growing_rope
from convert.rope import ORIGINAL

_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    ORIGINAL: 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    QUERY_BETA: 0.1,
}


def _read(get: Reader, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {**window_everywhere(get, fields), "rope": read_growing_rope(get, fields, _ROPE)}


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
    gguf=NOT_COMPARED,
)
