"""OLMoE: OLMo's normalised queries and keys, and a mixture of experts in every layer."""

from convert.families.family import Family
from convert.families.gguf import Architecture
from convert.families.mixture import Mixture, softmax_mixture
from convert.model.spec import ATTENTION_GROUPS

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
    numbers={"clip_qkv": "clip_qkv"},
    switches={"attention_bias": ATTENTION_GROUPS},
    constants={"qk_norm": "projection"},
    mixture=Mixture(softmax_mixture("num_experts", "num_local_experts")),
    gguf=Architecture("OLMOE", square=True, tied=False, normalizes=False, grouped=False),
)
