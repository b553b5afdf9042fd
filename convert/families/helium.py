"""Helium: Llama with neighbours as rotary pairs."""

from convert.families.family import Family
from convert.model.spec import MLP_GROUPS, QKV

HELIUM = Family(
    "helium",
    "HeliumForCausalLM",
    defaults={
        "num_key_value_heads": 20,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-8,
        "rope_theta": 1e5,
    },
    switches={"attention_bias": (QKV,), "mlp_bias": MLP_GROUPS},
    constants={"rope_interleaved": True, "norm_float32": True},
)
