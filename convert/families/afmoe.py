"""AFMoE (Trinity): gated attention, positions in windowed layers alone, and experts by sigmoids beside a shared one."""

from collections.abc import Mapping
from typing import Any

from convert.families.family import NOT_COMPARED, Family
from convert.families.mixture import Mixture, dense_first, sigmoid_router, with_shared
from convert.families.windows import windows
from convert.model.layers import Attention
from convert.model.moe import MoeConfig
from convert.model.reader import Reader
from convert.model.spec import ATTENTION_GROUPS


def _mixture(get: Reader, layers: int) -> tuple[MoeConfig, tuple[bool, ...]]:
    router = sigmoid_router(get, "num_experts", scale=get.positive("route_scale"))
    return with_shared(get, router, "num_shared_experts"), dense_first(get, layers, "num_dense_layers")


def _read(get: Reader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Full attention in every `global_attn_every_n_layers`-th layer, or by `layer_types`."""
    get.asked.add("load_balance_coeff")
    period = get.integer("global_attn_every_n_layers")
    mixers = windows(get, fields, lambda number: (number + 1) % period != 0, required=True)["mixers"]
    return {
        "mixers": tuple(Attention(rope=None) if one.sliding_window is None else one for one in mixers),
        "embedding_multiplier": fields["hidden_size"] ** 0.5 if get.flag("mup_enabled") else 1.0,
    }


AFMOE = Family(
    "afmoe",
    "AfmoeForCausalLM",
    classifier=None,
    defaults={
        "head_dim": 128,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "sliding_window": 1024,
        "global_attn_every_n_layers": 4,
        "num_dense_layers": 1,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "num_shared_experts": 2,
        "moe_intermediate_size": 1408,
        "route_scale": 1.0,
    },
    switches={"attention_bias": ATTENTION_GROUPS},
    constants={
        "attention_norms": ("input_layernorm", "post_attention_layernorm"),
        "mlp_norms": ("pre_mlp_layernorm", "post_mlp_layernorm"),
        "attention_gate": "projection",
        "norm_float32": True,
        "qk_norm": "head",
    },
    mixture=Mixture(_mixture, dense=True, router="router.gate", choice_bias="expert_bias", shared="shared_experts"),
    read=_read,
    # of published files, which transformers ignores
    neutral={
        **dict.fromkeys(("n_group", "topk_group", "num_expert_groups", "num_limited_groups"), (1,)),
        "route_norm": (True,),
        "score_func": ("sigmoid",),
        "use_grouped_mm": (True, False),
    },
    gguf=NOT_COMPARED,
)
