"""Llama 2, 3 and 3.1 to 3.3: attention and MLP biases, tied or untied head, grouped key heads, any head size.

Dimension letters: V vocabulary, E width, F feed-forward width, H query heads, K key heads, D head size, L layers.
"""

from convert.families.table import Config, Family, Ignored, Row, flag, size


def _dimensions(config: Config, file: str) -> dict[str, int]:
    heads = size(config, "num_attention_heads", file)
    width = size(config, "hidden_size", file)
    head_size = size(config, "head_dim", file, default=max(1, width // heads))
    return {
        "V": size(config, "vocab_size", file),
        "E": width,
        "F": size(config, "intermediate_size", file),
        "H*D": heads * head_size,
        "K*D": size(config, "num_key_value_heads", file, default=heads) * head_size,
        "L": size(config, "num_hidden_layers", file),
    }


def _flags(config: Config, file: str) -> frozenset[str]:
    raised = {name for name in ("attention_bias", "mlp_bias") if flag(config, name, file, default=False)}
    raised.add("tied" if flag(config, "tie_word_embeddings", file, default=False) else "untied")
    return frozenset(raised)


_ATTENTION = "model.layers.{i}.self_attn", "layers.{i}.self_attn"
_MLP = "model.layers.{i}.mlp", "layers.{i}.mlp"

FAMILY = Family(
    model_type="llama",
    table=(
        Row("model.embed_tokens.weight", "embed_tokens.weight", ("V", "E")),
        Row("model.layers.{i}.input_layernorm.weight", "layers.{i}.input_layernorm.weight", ("E",)),
        Row(f"{_ATTENTION[0]}.q_proj.weight", f"{_ATTENTION[1]}.q_proj.weight", ("H*D", "E")),
        Row(f"{_ATTENTION[0]}.q_proj.bias", f"{_ATTENTION[1]}.q_proj.bias", ("H*D",), when="attention_bias"),
        Row(f"{_ATTENTION[0]}.k_proj.weight", f"{_ATTENTION[1]}.k_proj.weight", ("K*D", "E")),
        Row(f"{_ATTENTION[0]}.k_proj.bias", f"{_ATTENTION[1]}.k_proj.bias", ("K*D",), when="attention_bias"),
        Row(f"{_ATTENTION[0]}.v_proj.weight", f"{_ATTENTION[1]}.v_proj.weight", ("K*D", "E")),
        Row(f"{_ATTENTION[0]}.v_proj.bias", f"{_ATTENTION[1]}.v_proj.bias", ("K*D",), when="attention_bias"),
        Row(f"{_ATTENTION[0]}.o_proj.weight", f"{_ATTENTION[1]}.o_proj.weight", ("E", "H*D")),
        Row(f"{_ATTENTION[0]}.o_proj.bias", f"{_ATTENTION[1]}.o_proj.bias", ("E",), when="attention_bias"),
        Row("model.layers.{i}.post_attention_layernorm.weight", "layers.{i}.post_attention_layernorm.weight", ("E",)),
        Row(f"{_MLP[0]}.gate_proj.weight", f"{_MLP[1]}.gate_proj.weight", ("F", "E")),
        Row(f"{_MLP[0]}.gate_proj.bias", f"{_MLP[1]}.gate_proj.bias", ("F",), when="mlp_bias"),
        Row(f"{_MLP[0]}.up_proj.weight", f"{_MLP[1]}.up_proj.weight", ("F", "E")),
        Row(f"{_MLP[0]}.up_proj.bias", f"{_MLP[1]}.up_proj.bias", ("F",), when="mlp_bias"),
        Row(f"{_MLP[0]}.down_proj.weight", f"{_MLP[1]}.down_proj.weight", ("E", "F")),
        Row(f"{_MLP[0]}.down_proj.bias", f"{_MLP[1]}.down_proj.bias", ("E",), when="mlp_bias"),
        Row("model.norm.weight", "norm.weight", ("E",)),
        Row("lm_head.weight", "lm_head.weight", ("V", "E"), when="untied"),
    ),
    ignored=(
        Ignored(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", "computed from config.json's RoPE settings"),
        Ignored(r"(model\.)?rotary_emb\.inv_freq", "computed from config.json's RoPE settings"),
        Ignored(r"lm_head\.weight", "a copy of the tied embeddings", when="tied", same_as="embed_tokens.weight"),
    ),
    dimensions=_dimensions,
    flags=_flags,
)
