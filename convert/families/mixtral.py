"""Mixtral: Mistral with a mixture of experts in every layer."""

from convert.families.family import Family
from convert.families.gguf import Architecture
from convert.families.mixture import Mixture, everywhere, softmax_router
from convert.families.windows import window_everywhere
from convert.model.moe import MoeConfig
from convert.model.reader import Reader


def _mixture(get: Reader, layers: int) -> tuple[MoeConfig, tuple[bool, ...]]:
    router = softmax_router(get, "num_local_experts", "num_experts", normalize=True)
    size = get.integer("intermediate_size")
    return MoeConfig(router, size), everywhere(layers)


MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    mixture=Mixture(_mixture, block="block_sparse_moe", projections=("w1", "w3", "w2")),
    read=window_everywhere,
    neutral={"router_jitter_noise": (0,)},
    gguf=Architecture("LLAMA", paired=True, normalizes=True),
)
