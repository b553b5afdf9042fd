"""EXAONE 4: normalisations after the blocks, normalised queries and keys, rotary positions in windowed layers alone."""

from collections.abc import Mapping
from typing import Any

from convert.families.family import NOT_COMPARED, Family
from convert.families.olmo2 import AFTER
from convert.model.layers import Attention
from convert.model.reader import Reader


def _read(get: Reader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Without `sliding_window` all layers have full attention and rotary positions."""
    layers, window = fields["num_hidden_layers"], get.optional_integer("sliding_window")
    types = get.layer_types(layers)
    get.asked.add("sliding_window_pattern")
    if types is None and window is not None:  # letter patterns come with layer_types
        period = get.integer("sliding_window_pattern")
        types = [(number + 1) % period != 0 for number in range(layers)]
    if window is None:
        if any(types or ()):
            raise get.wrong("sliding_window", "a positive integer, as there are layers with a window")
        return {}
    return {"mixers": tuple(Attention(window) if sliding else Attention(rope=None) for sliding in types or ())}


EXAONE4 = Family(
    "exaone4",
    "Exaone4ForCausalLM",
    defaults={"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4},
    constants={**AFTER, "qk_norm": "head"},
    read=_read,
    gguf=NOT_COMPARED,
)
