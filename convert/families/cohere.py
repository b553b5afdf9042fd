"""Cohere's Command R: attention and MLP side by side behind one normalisation, queries and keys normalised by head."""

from convert.families.blocks import ATTENTION, MLP, QK_NORM_HEADS, family, norm

COHERE = family(
    "cohere",
    norm("input_layernorm"),
    ATTENTION,
    QK_NORM_HEADS,
    MLP,
    defaults={"tie_word_embeddings": True},
    switches={"attention_bias": ("qkv_bias", "o_bias"), "use_qk_norm": ("qk_norm",)},
)
