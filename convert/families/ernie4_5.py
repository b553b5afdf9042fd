"""ERNIE 4.5 (dense): Llama with neighbours as rotary pairs."""

from convert.families.family import Family
from convert.families.gguf import Architecture
from convert.model.spec import ATTENTION_GROUPS, MLP_GROUPS

DEFAULTS = {
    "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
}

ERNIE4_5 = Family(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    classifier=None,
    defaults={**DEFAULTS, "num_key_value_heads": 2, "head_dim": 128},
    switches={"use_bias": (*ATTENTION_GROUPS, *MLP_GROUPS)},
    constants={"rope_interleaved": True},
    gguf=Architecture("ERNIE4_5"),
)
