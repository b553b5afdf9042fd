"""GLM 4.5 and 4.6: partly rotated heads, dense first layers, then mixtures with a sigmoid router, a shared expert."""

from collections.abc import Mapping
from typing import Any

from convert.families.family import FURTHER_TOKENS, IGNORED, NOT_COMPARED, Family
from convert.families.mixture import GROUPED, Mixture, grouped_mixture
from convert.model.reader import Reader
from convert.model.rope import read_rope
from convert.model.spec import QKV, qk_norm_flag


def _read(get: Reader, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"rope": read_rope(get, fields, partial=0.5), "qk_norm": "head" if get.flag("use_qk_norm") else None}


GLM4_MOE = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    classifier=None,
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 1408,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
    },
    switches={"attention_bias": (QKV,), "use_qk_norm": (qk_norm_flag("head"),)},
    mixture=Mixture(grouped_mixture(), dense=True, shared="shared_experts"),
    read=_read,
    neutral=GROUPED,
    ignored=(*IGNORED, FURTHER_TOKENS),
    gguf=NOT_COMPARED,
)
