"""Ministral: Mistral with windows in some layers."""

from collections.abc import Mapping
from typing import Any

from convert.families.family import Family
from convert.families.mistral import DEFAULTS
from convert.families.windows import types_to_hf
from convert.model.layers import Attention
from convert.model.reader import Reader


def _windows(get: Reader, fields: Mapping[str, Any]) -> dict[str, Any]:
    layers, window = fields["num_hidden_layers"], get.optional_integer("sliding_window")
    types = get.layer_types(layers) or [True] * layers
    return {"mixers": tuple(Attention(window if sliding else None) for sliding in types)}


MINISTRAL = Family(
    "ministral",
    "MinistralForCausalLM",
    defaults=DEFAULTS,
    read=_windows,
    write=types_to_hf,
    gguf="llama.cpp has no Mistral some of whose layers have windows",
)
