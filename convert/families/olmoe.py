"""OLMoE: OLMo's normalised queries and keys, and a mixture of experts in every layer."""

from convert.families.family import Family
from convert.families.gguf import Architecture
from convert.families.mixture import Mixture, everywhere, softmax_router
from convert.model.moe import MoeConfig
from convert.model.reader import Reader
from convert.model.spec import ATTENTION_GROUPS


def _mixture(get: Reader, layers: int) -> tuple[MoeConfig, tuple[bool, ...]]:
    router = softmax_router(get, "num_experts", "num_local_experts")
    size = get.integer("intermediate_size")
    return MoeConfig(router, size), everywhere(layers)


OLMOE = Family(
    "olmoe",
    "OlmoeForCausalLM",
    classifier=None,
    defaults={
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 8,
    },
    switches={"attention_bias": ATTENTION_GROUPS},
    constants={"qk_norm": "projection"},
    mixture=Mixture(_mixture),
    gguf=Architecture("OLMOE", square=True, tied=False, normalizes=False, grouped=False),
)
