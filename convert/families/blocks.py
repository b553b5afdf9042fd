"""The rows that families share; a family's table is put together from these, in the order of the model.

Dimension letters: V vocabulary, E width, F feed-forward width, H query heads, K key heads, D head size, L layers.
"""

from collections.abc import Callable, Mapping
from typing import Any

from convert.errors import unexpected
from convert.families.table import Config, Family, Ignored, Row, flag, size
from convert.limits import LAYERS

ROOT = "model."


def layer(name: str, *shape: str, when: str | None = None) -> Row:
    """A tensor inside a layer: its name there, its shape, and the flag that must be up."""
    return Row(f"{ROOT}layers.{{i}}.{name}", f"layers.{{i}}.{name}", shape, when)


def norm(name: str) -> tuple[Row, ...]:
    """The scale of a normalisation over the model's width."""
    return (layer(f"{name}.weight", "E"),)


def linear(name: str, out: str, into: str, bias: str | None = None) -> tuple[Row, ...]:
    """A matrix [out, in], and its bias where the flag `bias` is up."""
    weight = layer(f"{name}.weight", out, into)
    return (weight,) if bias is None else (weight, layer(f"{name}.bias", out, when=bias))


EMBEDDINGS = (Row(f"{ROOT}embed_tokens.weight", "embed_tokens.weight", ("V", "E")),)
ATTENTION = (
    *linear("self_attn.q_proj", "H*D", "E", "qkv_bias"),
    *linear("self_attn.k_proj", "K*D", "E", "qkv_bias"),
    *linear("self_attn.v_proj", "K*D", "E", "qkv_bias"),
    *linear("self_attn.o_proj", "E", "H*D", "o_bias"),
)
MLP = (
    *linear("mlp.gate_proj", "F", "E", "mlp_bias"),
    *linear("mlp.up_proj", "F", "E", "mlp_bias"),
    *linear("mlp.down_proj", "E", "F", "mlp_bias"),
)
#: A scale for each feature of a head, of all features of the projection, or of each head's own features.
QK_NORM = (layer("self_attn.q_norm.weight", "D"), layer("self_attn.k_norm.weight", "D"))
QK_NORM_WHOLE = (layer("self_attn.q_norm.weight", "H*D"), layer("self_attn.k_norm.weight", "K*D"))
QK_NORM_HEADS = (
    layer("self_attn.q_norm.weight", "H", "D", when="qk_norm"),
    layer("self_attn.k_norm.weight", "K", "D", when="qk_norm"),
)
HEAD = (
    Row(f"{ROOT}norm.weight", "norm.weight", ("E",)),
    Row("lm_head.weight", "lm_head.weight", ("V", "E"), when="untied"),
)
IGNORED = (
    Ignored(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", "computed from config.json's RoPE settings"),
    Ignored(r"(model\.)?rotary_emb\.inv_freq", "computed from config.json's RoPE settings"),
    Ignored(r"lm_head\.weight", "a copy of the tied embeddings", when="tied", same_as="embed_tokens.weight"),
)


def family(
    model_type: str,
    *rows: tuple[Row, ...],
    defaults: Mapping[str, Any] | None = None,
    switches: Mapping[str, tuple[str, ...]] | None = None,
    raised: tuple[str, ...] = (),
) -> Family:
    """A family whose sizes have their usual names.

    Args:
        model_type: as in config.json.
        rows: groups of rows between the embeddings and the final normalisation.
        defaults: what transformers takes for fields that config.json leaves out, where it is not Llama's.
        switches: fields of config.json -> the flags that they raise when they are true.
        raised: flags that are always up.
    """
    known = dict(defaults or {})
    return Family(
        model_type=model_type,
        table=(*EMBEDDINGS, *(row for group in rows for row in group), *HEAD),
        ignored=IGNORED,
        dimensions=_dimensions(known),
        flags=_flags(known, dict(switches or {}), raised),
        defaults=known,
    )


def _dimensions(defaults: Mapping[str, Any]) -> Callable[[Config, str], dict[str, int]]:
    def dimensions(config: Config, file: str) -> dict[str, int]:
        def number(field: str, otherwise: int | None = None) -> int:
            absent = defaults.get(field, otherwise)
            return size(config, field, file, default=otherwise if field in config else absent)

        width, heads, inner = number("hidden_size"), number("num_attention_heads"), number("intermediate_size")
        key_heads = number("num_key_value_heads", heads)
        head_size = number("head_dim", max(1, width // heads))
        return {
            "V": number("vocab_size"),
            "E": width,
            "F": inner,
            "2F": 2 * inner,
            "H": heads,
            "K": key_heads,
            "D": head_size,
            "H*D": heads * head_size,
            "K*D": key_heads * head_size,
            "(H+2K)*D": (heads + 2 * key_heads) * head_size,
            "L": _layers(number("num_hidden_layers"), file),
        }

    return dimensions


def _layers(count: int, file: str) -> int:
    if count > LAYERS:
        raise unexpected(file, "num_hidden_layers", f"at most {LAYERS}", count)
    return count


def _flags(
    defaults: Mapping[str, Any], switches: Mapping[str, tuple[str, ...]], raised: tuple[str, ...]
) -> Callable[[Config, str], frozenset[str]]:
    def flags(config: Config, file: str) -> frozenset[str]:
        def up(field: str) -> bool:
            return flag(config, field, file, default=bool(defaults.get(field, False)))

        found = {name for field, names in switches.items() if up(field) for name in names}
        return frozenset({*found, *raised, "tied" if up("tie_word_embeddings") else "untied"})

    return flags
