"""HunYuan V1 (dense): Llama with queries and keys normalised after the rotation."""

from collections.abc import Mapping
from typing import Any

from convert.errors import unexpected
from convert.families.family import NOT_COMPARED, Family
from convert.model.reader import Reader
from convert.model.rope import NAMES, parse_rope
from convert.model.spec import ATTENTION_GROUPS
from convert.rope import rope_settings

#: What published files have beside `alpha`, with which transformers reads past it.
_BESIDE_ALPHA = frozenset(("rope_type", "rope_theta", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"))


def _read(get: Reader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """A "dynamic" scaling with `alpha` becomes one stretched base, by alpha^(D/(D-2))."""
    get.asked |= NAMES
    positions, size = fields["max_position_embeddings"], fields["head_dim"]
    settings = rope_settings(get.config, get.where, theta=get.defaults["rope_theta"], positions=positions)
    alpha = settings.values.pop("alpha", None)
    if alpha and settings.values["rope_type"] == "dynamic":
        inner = Reader(settings.values | {"alpha": alpha}, f"{get.where}: {settings.field}", {})
        if size == 2:
            raise get.wrong("head_dim", "4 or more, with alpha")
        if unknown := sorted(set(settings.values) - _BESIDE_ALPHA):
            raise unexpected(get.where, settings.field, f"alpha, and beside it {sorted(_BESIDE_ALPHA)} alone", unknown)
        theta = inner.positive("rope_theta") * inner.positive("alpha") ** (size / (size - 2))
        settings = settings._replace(values={"rope_type": "default", "rope_theta": theta})
    return {"rope": parse_rope(settings, get.where, positions=positions, head_dim=size)}


HUNYUAN_V1_DENSE = Family(
    "hunyuan_v1_dense",
    "HunYuanDenseV1ForCausalLM",
    defaults={"rms_norm_eps": 1e-5},
    switches={"attention_bias": ATTENTION_GROUPS},
    constants={"qk_norm": "head", "qk_norm_after_rope": True},
    neutral={"use_qk_norm": (True,), "use_cla": (False,)},
    parts={"q_norm": "query_layernorm", "k_norm": "key_layernorm"},
    read=_read,
    gguf=NOT_COMPARED,
)
