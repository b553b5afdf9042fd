"""DeepSeek-V3.2 and GLM 5: DeepSeek-V3's layers, whose attention sees the tokens that an indexer chooses in long rows.

In rows of up to `index_topk` tokens the indexer chooses them all, and its weights have no effect.
"""

import dataclasses
from typing import Any

from convert.families.family import FURTHER_TOKENS, IGNORED, Ignored
from convert.families.latent import latent_family, latent_mixers
from convert.families.mixture import GROUPED, Mixture, dense_first, grouped_mixture, listed_mixtures
from convert.model.layers import LatentAttention
from convert.model.reader import Reader

#: Fields of the indexer that have no effect in such rows.
_INDEXER = frozenset(
    "index_head_dim index_n_heads indexer_types index_topk_freq index_skip_topk_offset index_topk_pattern".split()
)


def _mixers(get: Reader, layers: int) -> tuple[LatentAttention, ...]:
    get.asked |= _INDEXER
    kinds, expected = get.value("layer_types"), ["indexed_attention"] * layers
    if kinds not in (None, expected):
        raise get.wrong("layer_types", f"{layers} of {expected[0]}")
    kept = get.integer("index_topk")
    return tuple(dataclasses.replace(mixer, index_topk=kept) for mixer in latent_mixers(get, layers))


_SHARED: dict[str, Any] = {
    "classifier": None,
    "mixers": _mixers,
    "mixture": Mixture(grouped_mixture(listed_mixtures(dense_first)), dense=True, shared="shared_experts"),
    "neutral": {**GROUPED, "rope_interleave": (True,), "indexer_rope_interleave": (True, False)},
    "ignored": (
        *IGNORED,
        FURTHER_TOKENS,
        Ignored(r"model\.layers\.\d+\.self_attn\.indexer\..*", "of the indexer of longer rows", copied=True),
    ),
}
_DEFAULTS = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "index_topk": 2048,
}
DEEPSEEK_V32 = latent_family(
    "deepseek_v32",
    "DeepseekV32ForCausalLM",
    defaults={
        **_DEFAULTS,
        "max_position_embeddings": 163840,
        "q_lora_rank": 1536,
        "v_head_dim": 128,
        "qk_nope_head_dim": 128,
        "n_group": 8,
        "topk_group": 4,
    },
    **_SHARED,
)
GLM_MOE_DSA = latent_family(
    "glm_moe_dsa",
    "GlmMoeDsaForCausalLM",
    defaults={
        **_DEFAULTS,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 2048,
        "v_head_dim": 256,
        "qk_nope_head_dim": 192,
        "n_group": 1,
        "topk_group": 1,
    },
    **_SHARED,
)
