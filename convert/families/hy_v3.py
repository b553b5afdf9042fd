"""HY 3: normalised queries and keys, and experts by sigmoids beside a shared one behind the first layer."""

from convert.families.family import FURTHER_TOKENS, IGNORED, Family
from convert.families.mixture import Mixture, first_dense, listed_mixtures, sigmoid_router, with_shared
from convert.model.moe import MoeConfig
from convert.model.reader import Reader
from convert.model.spec import ATTENTION_GROUPS, MLP_GROUPS, SHARED_GROUPS

#: How the authors' own code computes; transformers passes over all but the first.
_IDLE = ("enable_moe_fp32_combine", "enable_attention_fp32_softmax", "enable_lm_head_fp32", "use_grouped_mm")


def _mixture(get: Reader, layers: int) -> tuple[MoeConfig, tuple[bool, ...]]:
    """`enable_moe_fp32_combine` adds two numbers, whose sum is rounded once in any case."""
    get.asked |= {*_IDLE, "num_nextn_predict_layers"}
    if get.value("expert_hidden_dim") not in (None, get.integer("moe_intermediate_size")):
        raise get.wrong("expert_hidden_dim", "the same as moe_intermediate_size")
    router = sigmoid_router(get, "num_experts", "num_local_experts", scale=get.positive("router_scaling_factor"))
    return with_shared(get, router, "num_shared_experts"), listed_mixtures(first_dense)(get, layers)


HY_V3 = Family(
    "hy_v3",
    "HYV3ForCausalLM",
    classifier=None,
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "initializer_range": 0.006,
        "rms_norm_eps": 1e-5,
        "rope_theta": 11_158_840.0,
        "num_experts": 192,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "moe_intermediate_size": 1536,
        "router_scaling_factor": 2.826,
    },
    switches={"attention_bias": ATTENTION_GROUPS, "mlp_bias": (*MLP_GROUPS, *SHARED_GROUPS)},
    constants={"qk_norm": "head"},
    mixture=Mixture(
        _mixture,
        dense=True,
        router="router.gate",
        choice_bias="expert_bias",
        shared="shared_mlp",
        renamed=False,
        held=(("router", "gate"), ("choice_bias", "e_score_correction_bias"), ("shared", "shared_experts")),
    ),
    neutral={
        "first_k_dense_replace": (1,),
        "moe_router_enable_expert_bias": (True,),
        "moe_router_use_sigmoid": (True,),
        "qk_norm": (True,),
        "route_norm": (True,),
    },
    ignored=(*IGNORED, FURTHER_TOKENS),
)
