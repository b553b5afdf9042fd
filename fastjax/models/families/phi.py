"""Phi-3, 3.5 and 4: fused projections, longrope, and a part of each head that turns."""

from collections.abc import Mapping
from typing import Any

from fastjax.models.families.family import ConfigFamily, Reader
from fastjax.models.families.llama import window_everywhere, window_to_hf
from fastjax.models.rope_config import parse_rope


def _phi3(get: Reader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """`original_max_position_embeddings` stands beside the scaling, and "yarn" was a name for longrope."""
    names = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
    config = {name: get.value(name) for name in names if get.value(name) is not None}
    for field in ("rope_scaling", "rope_parameters"):
        given = config.get(field) or {}
        kind = given.get("rope_type", given.get("type"))
        if kind == "yarn":
            config[field] = {**given, "rope_type": "longrope"}
    config |= {name: get.integer(name) for name in ("max_position_embeddings", "original_max_position_embeddings")}
    rope = parse_rope(config, get.where, head_dim=fields["head_dim"], partial_rotary=True)
    return {**window_everywhere(get, fields), "rope": rope}


PHI3 = ConfigFamily(
    "phi3",
    "Phi3ForCausalLM",
    defaults={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
    },
    constants={"fused": True},
    read=_phi3,
    write=lambda config: {
        **window_to_hf(config),
        "original_max_position_embeddings": config.rope.original_max_position_embeddings
        or config.max_position_embeddings,
    },
    partial_rotary=True,
    neutral={
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "lm_head_bias": (False,),
        "resid_pdrop": (0,),
        "embd_pdrop": (0,),
        "full_attn_mod": (1,),
        "interpolate_factor": (1,),
    },
)
