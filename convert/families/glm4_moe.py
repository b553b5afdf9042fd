"""GLM 4.5 and 4.6: partly rotated heads, dense first layers, then mixtures with a sigmoid router, a shared expert."""

from collections.abc import Mapping
from typing import Any

from convert.errors import unexpected
from convert.families.family import IGNORED, Family, Ignored
from convert.families.mixture import Mixture, chosen_experts, number_of_experts
from convert.model.moe import MoeConfig, RouterConfig
from convert.model.reader import Reader
from convert.model.rope import read_rope
from convert.model.spec import QKV, qk_norm_flag


def _mixture(get: Reader, layers: int) -> tuple[MoeConfig, tuple[bool, ...]]:
    get.asked |= {"num_nextn_predict_layers", "num_mtp_layers"}
    experts = number_of_experts(get, "n_routed_experts", "num_local_experts")
    chosen, groups = chosen_experts(get, experts), get.integer("n_group")
    if experts % groups or (experts < 2 * groups):
        raise get.wrong("n_group", f"a divisor of {experts} experts, two or more a group")
    allowed = get.integer("topk_group")
    if allowed > groups:
        raise get.wrong("topk_group", f"at most n_group, {groups}")
    if chosen > allowed * (experts // groups):
        raise get.wrong(
            "num_experts_per_tok", f"at most the {allowed * (experts // groups)} experts of {allowed} groups"
        )
    router = RouterConfig(
        experts,
        chosen,
        score="sigmoid",
        normalize=get.flag("norm_topk_prob"),
        scale=get.positive("routed_scaling_factor"),
        groups=groups,
        groups_per_token=allowed,
        choice_bias=True,
    )
    size, dense = get.integer("moe_intermediate_size"), get.count("first_k_dense_replace", layers - 1)
    moe = MoeConfig(router, size, size * get.integer("n_shared_experts"))
    if moe.shared_intermediate_size >= 2**31:
        raise unexpected(get.where, "n_shared_experts", "a width below 2³¹", moe.shared_intermediate_size)
    return moe, tuple(number >= dense for number in range(layers))


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
    mixture=Mixture(_mixture, dense=True, shared="shared_experts"),
    read=_read,
    ignored=(
        *IGNORED,
        Ignored(r"model\.layers\.{layers}\..*", "of the module that predicts further tokens", copied=True),
    ),
    gguf="its files have not been compared with llama.cpp",
)
