"""Qwen 3 with mixtures of experts, in every layer or in some."""

from collections.abc import Mapping
from typing import Any

from convert.families.family import Family
from convert.families.gguf import Architecture
from convert.families.mixture import Mixture, softmax_router, sparse_steps
from convert.model.layers import Attention
from convert.model.moe import MoeConfig
from convert.model.reader import Reader
from convert.model.spec import ATTENTION_GROUPS


def mixture(get: Reader, layers: int, *, shared: int = 0) -> tuple[MoeConfig, tuple[bool, ...]]:
    """The fields that Qwen 2 and 3 have in common.

    Args:
        get: the config.json.
        layers: number of layers.
        shared: width of the shared expert, which has a gate; 0: there is none.
    """
    router = softmax_router(get, "num_experts", "num_local_experts")
    size = get.integer("moe_intermediate_size")
    sparse = sparse_steps(get, layers)
    return MoeConfig(router, size, shared, shared > 0), sparse


def _read(get: Reader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """One window for all layers with `use_sliding_window`; transformers ignores `max_window_layers`."""
    get.asked |= {"sliding_window", "max_window_layers"}
    window = get.optional_integer("sliding_window") if get.flag("use_sliding_window") else None
    return {"mixers": (Attention(window),) * fields["num_hidden_layers"]}


QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    defaults={
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
    },
    switches={"attention_bias": ATTENTION_GROUPS},
    constants={"qk_norm": "head"},
    mixture=Mixture(mixture, dense=True),
    read=_read,
    gguf=Architecture("QWEN3MOE", normalizes=True),
)
