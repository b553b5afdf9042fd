"""Qwen 3.5 to 3.8 with mixtures of experts beside a gated shared one in every layer."""

import dataclasses

from convert.families.gguf import Architecture
from convert.families.mixture import Mixture, everywhere, softmax_router
from convert.families.qwen3_5 import QWEN3_5_TEXT
from convert.families.vision_tower import by_class
from convert.model.moe import MoeConfig
from convert.model.reader import Reader


def _mixture(get: Reader, layers: int) -> tuple[MoeConfig, tuple[bool, ...]]:
    router = softmax_router(get, "num_experts", "num_local_experts", normalize=True)
    sizes = get.integer("moe_intermediate_size"), get.integer("shared_expert_intermediate_size")
    return MoeConfig(router, *sizes, shared_gate=True), everywhere(layers)


QWEN3_5_MOE_TEXT = dataclasses.replace(
    QWEN3_5_TEXT,
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    defaults={
        **QWEN3_5_TEXT.defaults,
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "intermediate_size": 512,  # of dense layers, which there are none of
    },
    mixture=Mixture(_mixture, renamed=False),
    neutral={**QWEN3_5_TEXT.neutral, "norm_topk_prob": (True,), "decoder_sparse_step": (1,)},
    classifier=None,
    gguf=Architecture("QWEN35MOE", norm_shift=1.0, recurrent=True, normalizes=True),
)
QWEN3_5_MOE = by_class(QWEN3_5_MOE_TEXT, "qwen3_5_moe", ("visual",))
