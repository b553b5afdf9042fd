"""gpt-oss: attention sinks, a window in every other layer, and experts with biases and a clamped activation."""

from collections.abc import Mapping
from typing import Any

from convert.families.family import NOT_COMPARED, Family
from convert.families.mixture import Mixture, chosen_experts, everywhere, number_of_experts
from convert.families.windows import windows
from convert.model.moe import MoeConfig, RouterConfig
from convert.model.reader import Reader
from convert.model.rope import read_rope
from convert.model.spec import ATTENTION_GROUPS, INTERLEAVED
from convert.rope import NEW, OLD, ORIGINAL

_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    ORIGINAL: 4096,
}


def _mixture(get: Reader, layers: int) -> tuple[MoeConfig, tuple[bool, ...]]:
    # of the published files; transformers ignores the second
    get.asked |= {"experts_per_token"}
    experts = number_of_experts(get, "num_local_experts", "num_experts")
    router = RouterConfig(experts, chosen_experts(get, experts), score_after=True, bias=True)
    size = get.integer("intermediate_size")
    return MoeConfig(router, size, bias=True), everywhere(layers)


def _read(get: Reader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """A window in the layers of even number, or by `layer_types`; the activation is always the clamped one."""
    if get.value("hidden_act") != "silu":
        raise get.wrong("hidden_act", "'silu', which is clamped here")
    get.asked.add("initial_context_length")
    given = any(get.config.get(field) is not None for field in (NEW, OLD))
    return {
        **windows(get, fields, lambda number: number % 2 == 0, required=True),
        "rope": read_rope(get, fields, {} if given else {NEW: _ROPE}),
        "swiglu_limit": get.positive("swiglu_limit"),
        "swiglu_alpha": get.positive("swiglu_alpha"),
    }


GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "rope_theta": 150000.0,
        "attention_bias": True,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702,
    },
    switches={"attention_bias": ATTENTION_GROUPS},
    constants={"attention_sinks": True, "norm_float32": True, "hidden_act": "clamped_swiglu"},
    mixture=Mixture(_mixture, layout=INTERLEAVED, router="router", renamed=False),
    read=_read,
    gguf=NOT_COMPARED,
)
