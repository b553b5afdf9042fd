"""Qwen 1.5 and 2 with mixtures of experts, and a shared expert with a gate."""

from collections.abc import Mapping
from typing import Any

from convert.families import qwen3_moe
from convert.families.family import Family
from convert.families.gguf import Architecture
from convert.families.mixture import Mixture
from convert.families.windows import windows
from convert.model.moe import MoeConfig
from convert.model.reader import Reader
from convert.model.spec import QKV


def _mixture(get: Reader, layers: int) -> tuple[MoeConfig, tuple[bool, ...]]:
    return qwen3_moe.mixture(get, layers, shared=get.integer("shared_expert_intermediate_size"))


def _read(get: Reader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Windows in every other one of the first `max_window_layers`, or by `layer_types`; if `use_sliding_window`."""
    last = get.count("max_window_layers")
    return windows(get, fields, lambda number: number % 2 == 0 and number < last, switched=True)


QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    defaults={
        "num_key_value_heads": 16,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "qkv_bias": True,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "decoder_sparse_step": 1,
    },
    switches={"qkv_bias": (QKV,)},
    mixture=Mixture(_mixture, dense=True, renamed=False),
    read=_read,
    gguf=Architecture("QWEN2MOE", biases=(QKV,), square=True, tied=False, normalizes=False),
)
