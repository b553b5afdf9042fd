"""Nemotron: LayerNorm that scales by 1 + weight, an MLP without a gate, relu(x)², partly turning heads."""

from convert.families.family import Family
from convert.families.gguf import ALL_BIASES, Architecture
from convert.families.llama import BIASES
from convert.model.rope import read_rope

NEMOTRON = Family(
    "nemotron",
    "NemotronForCausalLM",
    defaults={
        "hidden_act": "relu2",
        "max_position_embeddings": 4096,
        "initializer_range": 0.0134,
        "norm_eps": 1e-5,
    },
    names={"norm_eps": "norm_eps"},
    switches=BIASES,
    constants={"norm": "layer", "norm_float32": True, "norm_offset": 1.0, "gated": False},
    norm_leaves=("weight", "bias"),
    read=lambda get, fields: {"rope": read_rope(get, fields, partial=0.5)},
    gguf=Architecture(
        "NEMOTRON",
        activation="relu2",
        biases=ALL_BIASES,
        norm_shift=1.0,
        square=True,
        scalings=("default", "linear"),
        scaling_named=True,
        tied=False,
    ),
)
