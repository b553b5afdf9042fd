"""DeepSeek-V3: latent attention, dense first layers, then experts chosen within groups; Kimi K2 under its own type."""

import dataclasses

from convert.families.family import FURTHER_TOKENS, IGNORED
from convert.families.latent import latent_family
from convert.families.mixture import GROUPED, Mixture, grouped_mixture

DEEPSEEK_V3 = latent_family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    defaults={
        "max_position_embeddings": 4096,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "qk_nope_head_dim": 128,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
    },
    mixture=Mixture(grouped_mixture(), dense=True, shared="shared_experts"),
    neutral=GROUPED,
    ignored=(*IGNORED, FURTHER_TOKENS),
)
KIMI_K2 = dataclasses.replace(DEEPSEEK_V3, model_type="kimi_k2")
