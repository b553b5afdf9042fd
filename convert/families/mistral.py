"""Mistral: Llama with one window for all layers."""

from convert.families.family import Family
from convert.families.gguf import ALL_BIASES, SCALINGS, Architecture
from convert.families.windows import window_everywhere

DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}

MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    defaults=DEFAULTS,
    read=window_everywhere,
    gguf=Architecture("LLAMA", paired=True, biases=ALL_BIASES, scalings=(*SCALINGS, "llama3")),
)
