"""OLMo 2: normalisations after the blocks only, and over whole projections."""

from convert.model.families.family import ATTENTION, ConfigFamily

OLMO2 = ConfigFamily(
    "olmo2",
    "Olmo2ForCausalLM",
    defaults={"rms_norm_eps": 1e-5},
    switches={"attention_bias": ATTENTION},
    constants={
        "attention_norms": (None, "post_attention_layernorm"),
        "mlp_norms": (None, "post_feedforward_layernorm"),
        "qk_norm": "projection",
        "norm_float32": True,
    },
)
