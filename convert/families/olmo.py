"""OLMo 2: no normalisation before a block, one after it; queries and keys are normalised over all heads together."""

from convert.families.blocks import ATTENTION, MLP, QK_NORM_WHOLE, family, norm

OLMO2 = family(
    "olmo2",
    ATTENTION,
    QK_NORM_WHOLE,
    norm("post_attention_layernorm"),
    MLP,
    norm("post_feedforward_layernorm"),
    switches={"attention_bias": ("qkv_bias", "o_bias")},
)
