"""GLM 4.7 Flash: DeepSeek-V3's layers, with the kind of each layer's feed-forward part in a list."""

from convert.families.family import FURTHER_TOKENS, IGNORED
from convert.families.latent import latent_family
from convert.families.mixture import GROUPED, Mixture, first_dense, grouped_mixture, listed_mixtures

GLM4_MOE_LITE = latent_family(
    "glm4_moe_lite",
    "Glm4MoeLiteForCausalLM",
    classifier=None,
    defaults={
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "kv_lora_rank": 512,
        "q_lora_rank": 768,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "qk_nope_head_dim": 192,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "moe_intermediate_size": 1536,
        "routed_scaling_factor": 1.8,
        "n_group": 1,
        "topk_group": 1,
    },
    mixture=Mixture(grouped_mixture(listed_mixtures(first_dense)), dense=True, shared="shared_experts"),
    # of the published file, whose list transformers makes
    neutral={**GROUPED, "first_k_dense_replace": (1,)},
    ignored=(*IGNORED, FURTHER_TOKENS),
)
