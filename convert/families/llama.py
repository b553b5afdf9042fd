"""Llama 2, 3 and 3.1 to 3.3."""

from convert.families.family import Family
from convert.families.gguf import ALL_BIASES, SCALINGS, Architecture
from convert.model.spec import ATTENTION_GROUPS, MLP_GROUPS

BIASES = {"attention_bias": ATTENTION_GROUPS, "mlp_bias": MLP_GROUPS}

LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    switches=BIASES,
    gguf=Architecture("LLAMA", paired=True, biases=ALL_BIASES, scalings=(*SCALINGS, "llama3")),
)
