"""Windowed layers in config.json."""

from collections.abc import Callable, Mapping
from typing import Any

from convert.model.layers import Attention
from convert.model.reader import FULL, SLIDING, Reader


def windows(
    get: Reader,
    fields: Mapping[str, Any],
    windowed: Callable[[int], bool],
    *,
    switched: bool = False,
    required: bool = False,
    local_rope: bool = False,
) -> dict[str, Any]:
    """Attention with `sliding_window` in the layers that `layer_types` names.

    Args:
        get: The config.json.
        fields: The fields of `ModelConfig` read so far.
        windowed: Whether a layer has a window, where there are no `layer_types`.
        switched: Whether there are windows only if `use_sliding_window` is true.
        required: Whether layers with a window need its size; they have full attention otherwise.
        local_rope: Whether rotary positions of layers with a window are others.
    """
    used = get.flag("use_sliding_window") if switched else True
    layers, window = fields["num_hidden_layers"], get.optional_integer("sliding_window") if used else None
    get.asked.add("sliding_window")
    types = get.layer_types(layers) or [windowed(number) for number in range(layers)]
    if required and window is None and any(types):
        raise get.wrong("sliding_window", "a positive integer, as there are layers with a window")
    rope = "local_rope" if local_rope else "rope"
    return {"mixers": tuple(Attention(window, rope) if sliding else Attention() for sliding in types)}


def window_everywhere(get: Reader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """One window for all layers, or none; `layer_types`, which transformers ignores, must agree."""
    window, layers = get.optional_integer("sliding_window"), fields["num_hidden_layers"]
    types = get.layer_types(layers)
    if types is not None and set(types) != {window is not None}:
        kind = FULL if window is None else SLIDING
        raise get.wrong("layer_types", f"{kind} for every layer, which is what sliding_window {window} means here")
    return {"mixers": (Attention(window),) * layers}
