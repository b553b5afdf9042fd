"""Phi 1, 1.5 and 2: parallel attention and MLP, LayerNorm, biases everywhere, partly turning heads."""

from collections.abc import Mapping
from typing import Any

from convert.families.family import Family
from convert.families.gguf import ALL_BIASES, Architecture
from convert.model.paths import HEAD
from convert.model.reader import Reader
from convert.model.rope import read_rope
from convert.model.spec import qk_norm_flag


def _read(get: Reader, fields: Mapping[str, Any]) -> dict[str, Any]:
    rope = read_rope(get, fields, partial=0.5)
    if rope.base_dim(fields["head_dim"]) % 2:  # transformers fails
        raise get.wrong("partial_rotary_factor", f"an even number of turning features of {fields['head_dim']}")
    return {
        "rope": rope,
        "qk_norm": "head" if get.flag("qk_layernorm") else None,
        "residual_dropout": get.probability("resid_pdrop"),
    }


PHI = Family(
    "phi",
    "PhiForCausalLM",
    defaults={"hidden_act": "gelu_new", "layer_norm_eps": 1e-5},
    names={"norm_eps": "layer_norm_eps"},
    switches={"qk_layernorm": (qk_norm_flag("head"),)},
    constants={
        "biases": (*ALL_BIASES, HEAD),
        "norm": "layer",
        "norm_float32": True,
        "mlp_norms": (None, None),
        "parallel_block": True,
        "gated": False,
    },
    norm_leaves=("weight", "bias"),
    parts={
        **{"o_proj": "dense", "up_proj": "fc1", "down_proj": "fc2", "norm": "final_layernorm"},
        **{"q_norm": "q_layernorm", "k_norm": "k_layernorm"},
    },
    read=_read,
    gguf=Architecture(
        "PHI2",
        activation="gelu_pytorch_tanh",
        biases=ALL_BIASES,
        square=True,
        grouped=False,
        scalings=("default",),
        tied=False,
    ),
)
