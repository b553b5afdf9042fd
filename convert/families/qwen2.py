"""Qwen 2 and 2.5: biases of queries, keys and values; windows by layer."""

from collections.abc import Mapping
from typing import Any

from convert.families.family import Family
from convert.families.gguf import Architecture
from convert.families.windows import windows
from convert.model.reader import Reader
from convert.model.spec import QKV

DEFAULTS = {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}


def read_windows(get: Reader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Windows from `max_window_layers` on, or from `layer_types`; only if `use_sliding_window` is true."""
    first = get.count("max_window_layers")
    return windows(get, fields, lambda number: number >= first, switched=True)


QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    defaults=DEFAULTS,
    constants={"biases": (QKV,)},
    read=read_windows,
    gguf=Architecture("QWEN2", biases=(QKV,)),
)
