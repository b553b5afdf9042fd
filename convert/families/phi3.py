"""Phi-3, 3.5 and 4: fused projections, longrope, and partly rotated heads."""

from collections.abc import Mapping
from typing import Any

from convert.families.family import Family
from convert.families.gguf import Architecture
from convert.families.windows import window_everywhere
from convert.model.reader import Reader
from convert.model.rope import read_rope
from convert.rope import ORIGINAL


def _read(get: Reader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """`original_max_position_embeddings` is beside the scaling, and "yarn" an old name of longrope."""
    rope = read_rope(get, fields, {ORIGINAL: get.integer(ORIGINAL)}, partial=1.0, phi3=True)
    return {**window_everywhere(get, fields), "rope": rope}


PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, ORIGINAL: 4096},
    constants={"fused": ("self_attn", "mlp")},
    read=_read,
    neutral={"lm_head_bias": (False,), "full_attn_mod": (1,), "interpolate_factor": (1,)},
    gguf=Architecture("PHI3", square=True, scalings=("default", "longrope"), original=True, window=True),
)
