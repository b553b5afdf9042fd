"""Mixtral: Mistral with a mixture of experts in every layer."""

from convert.families.family import Family
from convert.families.gguf import Architecture
from convert.families.mixture import Mixture, softmax_mixture
from convert.families.windows import window_everywhere

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
    mixture=Mixture(
        softmax_mixture("num_local_experts", "num_experts", normalize=True),
        block="block_sparse_moe",
        projections=("w1", "w3", "w2"),
    ),
    read=window_everywhere,
    neutral={"router_jitter_noise": (0,)},
    gguf=Architecture("LLAMA", paired=True, normalizes=True),
)
