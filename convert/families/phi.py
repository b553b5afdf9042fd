"""Phi-3, 3.5 and 4: queries, keys and values in one matrix, gate and up in another."""

from convert.families.blocks import family, linear, norm

PHI3 = family(
    "phi3",
    norm("input_layernorm"),
    linear("self_attn.qkv_proj", "(H+2K)*D", "E"),
    linear("self_attn.o_proj", "E", "H*D"),
    norm("post_attention_layernorm"),
    linear("mlp.gate_up_proj", "2F", "E"),
    linear("mlp.down_proj", "E", "F"),
)
