"""Qwen 3: Qwen 2 with normalised queries and keys, and without their biases."""

from convert.families.family import Family
from convert.families.gguf import Architecture
from convert.families.qwen2 import DEFAULTS, read_windows
from convert.model.spec import ATTENTION_GROUPS

QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    defaults={**DEFAULTS, "head_dim": 128},
    switches={"attention_bias": ATTENTION_GROUPS},
    constants={"qk_norm": "head"},
    read=read_windows,
    gguf=Architecture("QWEN3"),
)
