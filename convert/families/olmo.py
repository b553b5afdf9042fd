"""OLMo 1: LayerNorm without weights, and limits on queries, keys and values."""

from convert.families.family import Family
from convert.families.gguf import Architecture
from convert.model.spec import ATTENTION_GROUPS

OLMO = Family(
    "olmo",
    "OlmoForCausalLM",
    numbers={"clip_qkv": "clip_qkv"},
    switches={"attention_bias": ATTENTION_GROUPS},
    constants={"norm": "layer", "norm_eps": 1e-5, "norm_float32": True},
    norm_leaves=(),
    gguf=Architecture("OLMO", paired=True, square=True, optional={"clip_qkv": "clamp_kqv"}),
)
