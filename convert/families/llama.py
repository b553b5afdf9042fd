"""Llama and the families whose tensors have Llama's names: attention and MLP biases by flag, grouped key heads."""

from convert.families.blocks import ATTENTION, MLP, QK_NORM, family, norm

_LAYER = (norm("input_layernorm"), ATTENTION, norm("post_attention_layernorm"), MLP)
_BIASES = {"attention_bias": ("qkv_bias", "o_bias"), "mlp_bias": ("mlp_bias",)}

FAMILY = family("llama", *_LAYER, switches=_BIASES)  # 2, 3 and 3.1 to 3.3
QWEN2 = family("qwen2", *_LAYER, raised=("qkv_bias",))  # and 2.5
QWEN3 = family(
    "qwen3",
    norm("input_layernorm"),
    ATTENTION,
    QK_NORM,
    norm("post_attention_layernorm"),
    MLP,
    defaults={"head_dim": 128},
    switches={"attention_bias": ("qkv_bias", "o_bias")},
)
MISTRAL = family("mistral", *_LAYER, defaults={"num_key_value_heads": 8})
MINISTRAL = family("ministral", *_LAYER, defaults={"num_key_value_heads": 8})
GRANITE = family("granite", *_LAYER, switches=_BIASES)
SMOLLM3 = family("smollm3", *_LAYER, defaults={"tie_word_embeddings": True, "num_key_value_heads": 4}, switches=_BIASES)
