"""Apertus: normalised queries and keys, an MLP without a gate, and xIELU with numbers of each layer's own."""

from collections.abc import Mapping
from typing import Any

from convert.families.family import NOT_COMPARED, Family
from convert.model.reader import Reader
from convert.model.rope import read_rope
from convert.model.spec import ATTENTION_GROUPS, layer_row
from convert.rope import NEW, OLD, ORIGINAL

_ROPE = {
    **{"rope_type": "llama3", "rope_theta": 12e6, "factor": 8.0, ORIGINAL: 8192},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


def _read(get: Reader, fields: Mapping[str, Any]) -> dict[str, Any]:
    if get.value("hidden_act") != "xielu":
        raise get.wrong("hidden_act", "'xielu'")
    given = any(get.config.get(field) is not None for field in (NEW, OLD))
    return {"rope": read_rope(get, fields, {} if given else {NEW: _ROPE})}


APERTUS = Family(
    "apertus",
    "ApertusForCausalLM",
    classifier=None,
    defaults={
        "hidden_act": "xielu",
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-5,
        "rope_theta": 12e6,
    },
    switches={"attention_bias": ATTENTION_GROUPS},
    constants={
        "hidden_act": "xielu",
        "gated": False,
        "qk_norm": "head",
        "attention_norms": ("attention_layernorm", None),
        "mlp_norms": ("feedforward_layernorm", None),
    },
    rows=(
        *(layer_row(f"mlp.act_fn.{leaf}", "1", kind=leaf) for leaf in ("alpha_p", "alpha_n")),
        *(layer_row(f"mlp.act_fn.{leaf}", kind=leaf) for leaf in ("beta", "eps")),
    ),
    read=_read,
    neutral={"post_norm": (False,), "qk_norm": (True,)},  # of published files
    gguf=NOT_COMPARED,
)
