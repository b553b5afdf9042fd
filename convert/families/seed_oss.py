"""Seed-OSS: Llama with a bias by kind of projection, and dropout of attention's and MLP's outputs."""

from convert.families.family import NOT_COMPARED, Family
from convert.model.spec import MLP_GROUPS, OUT, QKV

SEED_OSS = Family(
    "seed_oss",
    "SeedOssForCausalLM",
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "attention_bias": True,
        "attention_dropout": 0.1,
        "residual_dropout": 0.1,
    },
    switches={"attention_bias": (QKV,), "attention_out_bias": (OUT,), "mlp_bias": MLP_GROUPS},
    read=lambda get, fields: {"residual_dropout": get.probability("residual_dropout")},
    gguf=NOT_COMPARED,
)
