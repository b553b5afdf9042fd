"""MiniMax M2: experts by sigmoids in every layer, queries and keys normalised over all heads, partly turning heads."""

from collections.abc import Mapping
from typing import Any

from convert.families.family import Family
from convert.families.gguf import Architecture
from convert.families.mixture import Mixture, everywhere, sigmoid_router
from convert.model.moe import MoeConfig
from convert.model.reader import Reader
from convert.model.rope import read_rope


def _mixture(get: Reader, layers: int) -> tuple[MoeConfig, tuple[bool, ...]]:
    router = sigmoid_router(get, "num_local_experts", "num_experts")
    return MoeConfig(router, get.integer("intermediate_size")), everywhere(layers)


def _read(get: Reader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """`rotary_dim` is the number of turning features, where nothing else says it; all layers have full attention."""
    get.asked |= {"use_mtp", "num_mtp_modules", "mtp_transformer_layers"}
    turning, size = get.optional_integer("rotary_dim"), fields["head_dim"]
    if turning is not None and turning > size:
        raise get.wrong("rotary_dim", f"at most head_dim, {size}")
    rope = read_rope(get, fields, partial=1.0 if turning is None else turning / size)
    if turning not in (None, rope.base_dim(size)):
        raise get.wrong("rotary_dim", f"{rope.base_dim(size)}, as the rotary settings say")
    kinds = get.value("attn_type_list")
    if kinds is not None and kinds != [1] * fields["num_hidden_layers"]:
        raise get.wrong("attn_type_list", "1 for every layer: full attention")
    return {"rope": rope}


MINIMAX_M2 = Family(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    classifier=None,
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 196608,
        "rope_theta": 5e6,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
    },
    constants={"qk_norm": "projection"},
    mixture=Mixture(
        _mixture,
        block="block_sparse_moe",
        choice_bias="e_score_correction_bias",
        projections=("w1", "w3", "w2"),
    ),
    read=_read,
    neutral={
        "router_jitter_noise": (0,),
        "qk_norm_type": ("per_layer",),
        "scoring_func": ("sigmoid",),
        "shared_intermediate_size": (0,),
        "shared_moe_mode": ("sigmoid",),
        "use_qk_norm": (True,),
        "use_routing_bias": (True,),
    },
    gguf=Architecture("MINIMAXM2", tied=False, normalizes=True),
)
