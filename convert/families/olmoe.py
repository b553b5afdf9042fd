"""OLMoE: OLMo's normalised queries and keys, and a mixture of experts in every layer."""

from typing import Any

from convert.families.family import Family
from convert.families.gguf import Architecture
from convert.families.mixture import Mixture, everywhere, softmax_router, softmax_to_hf
from convert.model.config import ModelConfig
from convert.model.moe import MoeConfig
from convert.model.reader import Reader
from convert.model.spec import ATTENTION_GROUPS


def _mixture(get: Reader, layers: int) -> tuple[MoeConfig, tuple[bool, ...]]:
    get.asked.add("output_router_logits")
    router = softmax_router(get, "num_experts", "num_local_experts")
    size, balancing = get.integer("intermediate_size"), get.number("router_aux_loss_coef")
    return MoeConfig(router, size, load_balancing=balancing), everywhere(layers)


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    assert config.moe is not None
    return {**softmax_to_hf(config, "num_experts"), "norm_topk_prob": config.moe.router.normalize}


OLMOE = Family(
    "olmoe",
    "OlmoeForCausalLM",
    classifier=None,
    defaults={
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "router_aux_loss_coef": 0.01,
    },
    switches={"attention_bias": ATTENTION_GROUPS},
    constants={"qk_norm": "projection"},
    mixture=Mixture(_mixture),
    write=_to_hf,
    gguf=Architecture("OLMOE", square=True, tied=False, normalizes=False, grouped=False),
)
