"""Gemma: scaled embeddings, and normalisations that scale by 1 + weight."""

from collections.abc import Mapping
from typing import Any

from convert.families.family import Family
from convert.families.gguf import Architecture
from convert.model.reader import Reader
from convert.model.spec import ATTENTION_GROUPS

TANH = "gelu_pytorch_tanh"
BIASES = {"attention_bias": ATTENTION_GROUPS}
ATTENDS_BACKWARD_ONLY = {"use_bidirectional_attention": (None, False)}


def scaled(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Embeddings times √width."""
    return {"embedding_multiplier": fields["hidden_size"] ** 0.5}


def _read(get: Reader, fields: Mapping[str, Any]) -> dict[str, Any]:
    get.asked.add("hidden_activation")  # transformers reads hidden_act and takes its "gelu" for the approximation
    act = {"hidden_act": TANH} if get.value("hidden_act") == "gelu" else {}
    return {**scaled(fields), **act}


GEMMA = Family(
    "gemma",
    "GemmaForCausalLM",
    defaults={
        "tie_word_embeddings": True,
        "head_dim": 256,
        "num_key_value_heads": 16,
        "hidden_act": TANH,
        "max_position_embeddings": 8192,
    },
    switches=BIASES,
    constants={"norm_offset": 1.0},
    read=_read,
    neutral=ATTENDS_BACKWARD_ONLY,
    gguf=Architecture("GEMMA", activation=TANH, norm_shift=1.0),
)
