"""OLMo 2: normalisations after the blocks only; queries and keys are normalised over all heads together."""

from convert.families.family import Family
from convert.families.gguf import Architecture
from convert.model.spec import ATTENTION_GROUPS

AFTER = {
    "attention_norms": (None, "post_attention_layernorm"),
    "mlp_norms": (None, "post_feedforward_layernorm"),
}
CONSTANTS = {**AFTER, "qk_norm": "projection", "norm_float32": True}

OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    defaults={"rms_norm_eps": 1e-5},
    switches={"attention_bias": ATTENTION_GROUPS},
    constants=CONSTANTS,
    gguf=Architecture("OLMO2", square=True, tied=False),
)
