"""SmolLM 3: Llama with some layers without rotary positions."""

from collections.abc import Mapping
from typing import Any

from convert.families.family import Family
from convert.families.gguf import Architecture
from convert.families.llama import BIASES
from convert.model.layers import Attention
from convert.model.reader import Reader


def _layers(get: Reader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Layers without positions; with `use_sliding_window` these have windows."""
    layers, interval = fields["num_hidden_layers"], get.integer("no_rope_layer_interval")
    turning = get.value("no_rope_layers")  # 1: the layer has positions
    if turning is None:
        turning = [int((number + 1) % interval != 0) for number in range(layers)]
    if not isinstance(turning, list) or len(turning) < layers or not all(one in (0, 1) for one in turning):
        raise get.wrong("no_rope_layers", f"{layers} of 0 and 1")
    window = get.optional_integer("sliding_window")
    window = window if get.flag("use_sliding_window") else None
    types = get.layer_types(layers) or [not one for one in turning[:layers]]
    kinds = zip(types, turning[:layers], strict=True)
    return {"mixers": tuple(Attention(window if sliding else None, "rope" if one else None) for sliding, one in kinds)}


SMOLLM3 = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    defaults={
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 2e6,
        "no_rope_layer_interval": 4,
    },
    switches=BIASES,
    read=_layers,
    neutral={"max_window_layers": (28,)},  # Qwen's field in the published files, meaningless here
    gguf=Architecture("SMOLLM3", paired=True, position_free=4),
)
