"""Mistral 4: DeepSeek-V3's layers, a router by softmax, and queries that grow with their position."""

from collections.abc import Mapping
from typing import Any

from convert.families.latent import latent_family, latent_fields
from convert.families.mixture import Mixture, grouped_mixture
from convert.model.reader import Reader
from convert.model.rope import QUERY_BETA, read_growing_rope
from convert.model.spec import MERGED
from convert.rope import ORIGINAL

_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    ORIGINAL: 8192,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    QUERY_BETA: 0.1,
}


def _read(get: Reader, fields: Mapping[str, Any]) -> dict[str, Any]:
    latent = fields["mixers"][0]
    share = latent.qk_rope_head_dim / latent.qk_head_dim  # of a whole head in transformers
    return latent_fields(get, fields, read_growing_rope(get, fields, _ROPE, share))


MISTRAL4 = latent_family(
    "mistral4",
    "Mistral4ForCausalLM",
    defaults={
        "max_position_embeddings": 1048576,
        "kv_lora_rank": 256,
        "q_lora_rank": 1024,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "qk_nope_head_dim": 64,
        "n_routed_experts": 128,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
    },
    read=_read,
    mixture=Mixture(
        grouped_mixture(score="softmax"), dense=True, layout=MERGED, shared="shared_experts", renamed=False
    ),
)
