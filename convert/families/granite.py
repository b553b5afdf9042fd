"""Granite: Llama with multipliers of embeddings, residuals, scores and logits."""

from convert.families.family import Family
from convert.families.gguf import ALL_BIASES, Architecture
from convert.families.llama import BIASES

_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier")

GRANITE = Family(
    "granite",
    "GraniteForCausalLM",
    classifier=None,
    defaults=dict.fromkeys((*_MULTIPLIERS, "logits_scaling"), 1.0),
    numbers={name: name for name in _MULTIPLIERS},
    switches=BIASES,
    read=lambda get, fields: {"logit_scale": 1 / get.positive("logits_scaling")},
    gguf=Architecture(
        "GRANITE",
        paired=True,
        biases=ALL_BIASES,
        numbers={
            "attention_multiplier": "attention_scale",
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
    ),
)
