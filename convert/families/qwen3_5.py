"""Qwen 3.5 to 3.8: three of four layers with Gated DeltaNet, attention with an output gate, and a vision tower."""

from collections.abc import Mapping
from typing import Any

from convert.families import gated_delta
from convert.families.family import Family
from convert.families.gguf import Architecture
from convert.families.vision_tower import by_class
from convert.model.layers import Mixer
from convert.model.reader import Reader
from convert.model.rope import read_rope
from convert.model.spec import ATTENTION_GROUPS

CONSTANTS = {"qk_norm": "head", "norm_offset": 1.0, "attention_gate": "queries"}


def quarter_rotary(get: Reader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """A quarter of each head turns, unless the settings say otherwise."""
    get.asked |= gated_delta.OF_PREDICTOR
    return {"rope": read_rope(get, fields, partial=0.25)}


def mixers(get: Reader, layers: int) -> tuple[Mixer, ...]:
    """The layers' mixers."""
    return gated_delta.layers_of(get, layers, gated_delta.read_delta(get))


QWEN3_5_TEXT = Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    defaults={
        **gated_delta.DEFAULTS,
        "vocab_size": 248320,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 32768,
    },
    switches={"attention_bias": ATTENTION_GROUPS},
    constants=CONSTANTS,
    mixers=mixers,
    rows=gated_delta.APART,
    read=quarter_rotary,
    neutral=gated_delta.NEUTRAL,
    ignored=gated_delta.WITH_PREDICTOR,
    classifier="Qwen3_5TextForSequenceClassification",
    gguf=Architecture("QWEN35", norm_shift=1.0, recurrent=True),
)
QWEN3_5 = by_class(QWEN3_5_TEXT, "qwen3_5", ("visual",))
