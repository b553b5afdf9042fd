"""Cohere's Command R: LayerNorm, attention and MLP side by side, neighbours as rotary pairs, scaled logits."""

from convert.model.families.family import ATTENTION, ConfigFamily

COHERE = ConfigFamily(
    "cohere",
    "CohereForCausalLM",
    defaults={
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "rope_theta": 5e5,
        "logit_scale": 0.0625,
    },
    names={"norm_eps": "layer_norm_eps"},
    numbers={"logit_scale": "logit_scale"},
    switches={"attention_bias": ATTENTION},
    constants={
        "norm": "layer",
        "norm_float32": True,
        "mlp_norms": (None, None),
        "parallel_block": True,
        "rope_interleaved": True,
    },
    read=lambda get, fields: {"qk_norm": "heads" if get.flag("use_qk_norm") else None},
    write=lambda config: {"use_qk_norm": config.qk_norm is not None},
)
