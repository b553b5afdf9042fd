"""Arcee: Llama with an MLP without a gate, down(relu(up(x))²)."""

from convert.families.family import NOT_COMPARED, Family
from convert.families.llama import BIASES

ARCEE = Family(
    "arcee",
    "ArceeForCausalLM",
    defaults={"hidden_act": "relu2", "rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    switches=BIASES,
    constants={"gated": False},
    gguf=NOT_COMPARED,
)
