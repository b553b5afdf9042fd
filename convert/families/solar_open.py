"""Solar Open: GLM 4.5's mixtures in every layer, over Llama's attention."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from convert.errors import unexpected
from convert.families.family import IGNORED
from convert.families.glm4_moe import GLM4_MOE
from convert.families.mixture import GROUPED, Mixture, everywhere, grouped_mixture
from convert.model.reader import Reader
from convert.model.rope import read_rope
from convert.model.spec import QKV


def _read(get: Reader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Heads turn whole: transformers fails with others."""
    rope = read_rope(get, fields, partial=1.0)
    if rope.partial_rotary_factor != 1:
        raise unexpected(get.where, "partial_rotary_factor", "1 (every pair turns)", rope.partial_rotary_factor)
    return {"rope": rope}


SOLAR_OPEN = dataclasses.replace(
    GLM4_MOE,
    model_type="solar_open",
    architecture="SolarOpenForCausalLM",
    defaults={
        **GLM4_MOE.defaults,
        "head_dim": 128,
        "intermediate_size": 10240,  # of no layer; published files have it, and transformers' class has not
        "moe_intermediate_size": 1280,
        "rope_theta": 1e6,
    },
    switches={"attention_bias": (QKV,)},
    mixture=Mixture(grouped_mixture(lambda get, layers: everywhere(layers)), shared="shared_experts"),
    read=_read,
    neutral={**GROUPED, "first_k_dense_replace": (0,)},
    ignored=IGNORED,
)
