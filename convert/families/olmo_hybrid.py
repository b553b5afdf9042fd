"""OLMo Hybrid: OLMo 3's attention in some layers, Gated DeltaNet with updates up to 2 in the others."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from convert.families.family import Family
from convert.families.gated_delta import DECAY, GATES, INPUT, OUT, layers_of, projection, read_delta, taps
from convert.families.olmo2 import CONSTANTS
from convert.model.layers import Attention, GatedDelta, Mixer
from convert.model.paths import WeightPath
from convert.model.reader import Reader
from convert.model.rope import read_rope
from convert.model.spec import ATTENTION_GROUPS, Row, norm
from convert.rope import NEW

_BLOCK = GatedDelta.block
#: Normalisations before mixer and MLP in layers with Gated DeltaNet; those with attention have theirs behind them.
_BEFORE = ("input_layernorm", None), ("post_attention_layernorm", None)


def _mixers(get: Reader, layers: int) -> tuple[Mixer, ...]:
    width, heads = get.integer("hidden_size"), get.integer("num_attention_heads")
    keys = get.integer("linear_num_key_heads", heads)
    size = get.integer("linear_key_head_dim", max(1, int(0.75 * width / keys)))
    delta = dataclasses.replace(
        read_delta(
            get,
            linear_num_key_heads=keys,
            linear_num_value_heads=heads,
            linear_key_head_dim=size,
            linear_value_head_dim=2 * size,
        ),
        largest_update=2.0 if get.flag("linear_allow_neg_eigval") else 1.0,
        norm_eps=1e-5,
    )
    return layers_of(get, layers, delta)


def _read(get: Reader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """A base of rotary positions that is null means none of them."""
    get.asked |= {f"linear_{name}" for name in ("a_log_min", "a_log_max", "dt_min", "dt_max", "dt_init_floor")}
    rope = get.config.get(NEW)
    if not isinstance(rope, Mapping) or rope.get("rope_theta", 0) is not None:
        return {}
    free = (Attention(rope=None) if isinstance(mixer, Attention) else mixer for mixer in fields["mixers"])
    return {"mixers": tuple(free), "rope": read_rope(get, fields, {NEW: None})}


OLMO_HYBRID = Family(
    "olmo_hybrid",
    "OlmoHybridForCausalLM",
    defaults={
        "max_position_embeddings": 65536,
        "linear_conv_kernel_dim": 4,
        "linear_allow_neg_eigval": True,
        "full_attention_interval": 4,
    },
    switches={"attention_bias": ATTENTION_GROUPS},
    constants={**CONSTANTS, "recurrent_norms": _BEFORE},
    mixers=_mixers,
    rows=(
        *(row._replace(mixer=_BLOCK) for name, _ in _BEFORE for row in norm(name)),
        projection("q_proj", "J*P", "E", INPUT),
        projection("k_proj", "J*P", "E", INPUT),
        projection("v_proj", "G*U", "E", INPUT),
        projection("g_proj", "G*U", "E", INPUT),
        projection("b_proj", "G", "E", GATES),
        projection("a_proj", "G", "E", GATES),
        *(taps(f"{part}_conv1d", width) for part, width in (("q", "J*P"), ("k", "J*P"), ("v", "G*U"))),
        *DECAY,
        Row(f"model.layers.{{i}}.{_BLOCK}.o_norm.weight", WeightPath(0, _BLOCK, "norm"), ("U",), "scale"),
        projection("o_proj", "E", "G*U", OUT),
    ),
    read=_read,
    classifier=None,
)
