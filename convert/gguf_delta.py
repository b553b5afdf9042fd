"""Gated DeltaNet in GGUF files: llama.cpp's keys, and its order of the heads of values.

Here and in transformers the value heads of one key head stand together. llama.cpp repeats all key heads as a whole, so
that value head h reads key head h mod J: its files have the first value head of each key head, then the second ones.
"""

from typing import Any

import numpy as np
from jaxtyping import Float

from convert.model.config import ModelConfig
from convert.model.layers import Attention, GatedDelta
from convert.model.reader import Reader

#: Path inside the block -> the name that the `gguf` library knows, where that is another.
NAMES = {"dt_bias.weight": "dt_proj.bias", "A_log.weight": "A_log"}
#: Parts of a rotary position's pairs for time, height, width and nothing, as published; in texts all are alike.
_SECTIONS = (11, 11, 10)


def delta_keys(model: ModelConfig, get: Reader) -> dict[str, Any]:
    """Keys of the recurrent layers, as `GGUFWriter.add_…` is called.

    Args:
        model: with attention in every n-th layer.
        get: its config.json.

    Raises:
        ConvertError: Attention in other layers.
    """
    kinds = [isinstance(layer.mixer, Attention) for layer in model.layers]
    interval = kinds.index(True) + 1 if True in kinds else 0
    if not 1 < interval or kinds != [(number + 1) % interval == 0 for number in range(len(kinds))]:
        raise get.wrong("layer_types", "attention in every n-th layer and no others, for GGUF")
    delta, rope = model.recurrent[0], get.config.get("rope_parameters") or {}
    return {
        "full_attention_interval": interval,
        "ssm_conv_kernel": delta.taps,
        "ssm_state_size": delta.key_dim,
        "ssm_group_count": delta.key_heads,
        "ssm_time_step_rank": delta.value_heads,
        "ssm_inner_size": delta.value_heads * delta.value_dim,
        "rope_dimension_sections": [*rope.get("mrope_section", _SECTIONS), 0],
    }


def delta_values(part: str, values: Float[np.ndarray, "..."], delta: GatedDelta) -> Float[np.ndarray, "..."]:
    """A weight as llama.cpp has it: heads by turns, the decay as -exp(A_log), the convolution [channels, taps].

    Args:
        part: Name of the weight in its block.
        values: All of it, float32.
        delta: The layer's settings.
    """
    if part == "norm":
        return values
    size = 1 if part in ("in_proj_b", "in_proj_a", "A_log", "dt_bias") else delta.value_dim
    places = np.arange(delta.value_heads * size).reshape(delta.key_heads, -1, size)
    order = places.swapaxes(0, 1).reshape(-1)
    if part == "out_proj":
        return values[:, order]
    others = len(values) - len(order)  # rows of queries and keys
    turned = np.concatenate([values[:others], values[others:][order]])
    if part == "A_log":
        return -np.exp(turned)
    return turned.reshape(len(turned), -1) if part == "conv1d" else turned
