"""The fields of latent attention in a config.json, by DeepSeek-V3's names, and what its families share."""

from collections.abc import Mapping
from typing import Any

from convert.families.family import NOT_COMPARED, Family
from convert.model.layers import LatentAttention
from convert.model.reader import Reader
from convert.model.rope import RopeConfig, read_rope
from convert.model.spec import LATENT, OUT, QKV

#: Fields that transformers computes of others, whatever the file says.
_COMPUTED = frozenset(("head_dim", "qk_head_dim"))


def latent_mixers(get: Reader, layers: int) -> tuple[LatentAttention, ...]:
    """Latent attention in every layer.

    Raises:
        ConvertError: A size is missing or wrong; key heads that differ from the query heads.
    """
    get.asked |= _COMPUTED
    heads = get.integer("num_attention_heads")
    if get.integer("num_key_value_heads", heads) != heads:
        raise get.wrong("num_key_value_heads", f"{heads}, a key for each head, made of the latent")
    sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    queries = get.optional_integer("q_lora_rank") or 0
    return (LatentAttention(heads, queries, *map(get.integer, sizes)),) * layers


def latent_fields(get: Reader, fields: Mapping[str, Any], rope: RopeConfig | None = None) -> dict[str, Any]:
    """Rotary positions, and the scale of the logits, which YaRN's mscale_all_dim grows.

    Args:
        get: The config.json.
        fields: The fields of `ModelConfig` read so far.
        rope: Rotary positions that a family reads otherwise.
    """
    rope = read_rope(get, fields) if rope is None else rope
    scale = fields["mixers"][0].qk_head_dim ** -0.5 * rope.latent_factor
    return {"rope": rope, "rope_interleaved": get.flag("rope_interleave"), "attention_multiplier": scale}


def latent_family(model_type: str, architecture: str, **others: Any) -> Family:
    """A family whose layers all have latent attention.

    Args:
        model_type: ``model_type`` in config.json.
        architecture: Its class in transformers.
        others: Further attributes of `Family`.
    """
    shared: dict[str, Any] = {
        "names": {"head_dim": "qk_rope_head_dim"},
        "switches": {"attention_bias": (QKV, OUT)},
        "mixers": latent_mixers,
        "rows": LATENT,
        "read": latent_fields,
        "gguf": NOT_COMPARED,
    }
    others["defaults"] = {"rope_interleave": True, "norm_topk_prob": True, **others["defaults"]}
    return Family(model_type, architecture, **shared | others)
