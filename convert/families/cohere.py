"""Cohere's Command R: LayerNorm, parallel attention and MLP, neighbours as rotary pairs, scaled logits."""

from convert.families.family import Family
from convert.families.gguf import Architecture
from convert.model.spec import ATTENTION_GROUPS, qk_norm_flag

NUMBERS = {"logit_scale": "logit_scale"}

COHERE = Family(
    "cohere",
    "CohereForCausalLM",
    classifier=None,
    defaults={
        "tie_word_embeddings": True,
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "rope_theta": 5e5,
        "logit_scale": 0.0625,
    },
    names={"norm_eps": "layer_norm_eps"},
    numbers={"logit_scale": "logit_scale"},
    switches={"attention_bias": ATTENTION_GROUPS, "use_qk_norm": (qk_norm_flag("heads"),)},
    constants={
        "norm": "layer",
        "norm_float32": True,
        "mlp_norms": (None, None),
        "parallel_block": True,
        "rope_interleaved": True,
    },
    read=lambda get, fields: {"qk_norm": "heads" if get.flag("use_qk_norm") else None},
    gguf=Architecture(
        "COMMAND_R",
        square=True,
        numbers=NUMBERS,
        scaling_named=True,
        qk_norm_from=64,
    ),
)
