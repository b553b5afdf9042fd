"""GLM-4: normalisations on both sides of each block, gate and up as one, partly turning heads of neighbours."""

from convert.families.family import Family
from convert.families.gguf import Architecture
from convert.model.rope import read_rope
from convert.model.spec import QKV

GLM4 = Family(
    "glm4",
    "Glm4ForCausalLM",
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1.5625e-7,
        "attention_bias": True,
    },
    switches={"attention_bias": (QKV,)},
    constants={
        "attention_norms": ("input_layernorm", "post_self_attn_layernorm"),
        "mlp_norms": ("post_attention_layernorm", "post_mlp_layernorm"),
        "fused": ("mlp",),
        "rope_interleaved": True,
    },
    read=lambda get, fields: {"rope": read_rope(get, fields, partial=0.5)},
    gguf=Architecture("GLM4", biases=(QKV,)),
)
